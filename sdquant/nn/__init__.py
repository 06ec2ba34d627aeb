"""sdquant's own layers: quantized Linear, Conv and Embedding over plain tensors (runtime "plain"), and OpenVINO's.

Each is a subclass of its `torch.nn` original, so that code which looks for `nn.Linear` finds it. The packed parts are
ordinary parameters (without gradient), so that moving, offloading, copying and saving just work.
In: packed weights and modules. Out: modules. May import `backends` and what is below. Importing this imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layer_factory import packed_of, quantized_layer
    from .quantized_layers import QuantizedLayer, kind_of

__all__ = ["QuantizedLayer", "kind_of", "packed_of", "quantized_layer"]


_LAZY = {
    "QuantizedLayer": "quantized_layers",
    "kind_of": "quantized_layers",
    "packed_of": "layer_factory",
    "quantized_layer": "layer_factory",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

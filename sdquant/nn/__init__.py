"""sdquant's own layers: quantized Linear, Conv and Embedding over plain tensors (runtime "plain"), and OpenVINO's.

Each is a subclass of its `torch.nn` original, so that code which looks for `nn.Linear` finds it. The packed parts are
ordinary parameters (without gradient), so that moving, offloading, copying and saving just work.
In: packed weights and modules. Out: modules. May import `backends` and what is below. Importing this imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .quantized_layers import QuantizedLayer, kind_of, packed_of, quantized_layer

__all__ = ["QuantizedLayer", "kind_of", "packed_of", "quantized_layer"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.quantized_layers"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

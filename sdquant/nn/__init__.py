"""sdquant's own layers: quantized Linear, Conv and Embedding over plain tensors (runtime "plain"), and OpenVINO's.

Each is a subclass of its `torch.nn` original, so that code which looks for `nn.Linear` finds it. The packed parts are
ordinary parameters (without gradient), so that moving, offloading, copying and saving just work.
In: packed weights and modules. Out: modules. May import `backends` and what is below. Importing this imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .layer_checks import require_fit, settings_of
    from .layer_factory import empty_float_layer, float_layer, packed_of, quantized_layer, set_compute
    from .openvino import memory_model as openvino_memory
    from .quantized_layers import (
        QuantizedConv1d,
        QuantizedConv2d,
        QuantizedConv3d,
        QuantizedLayer,
        QuantizedLinear,
        kind_of,
    )
    from .state_dict import LIKE as LIKE_KEY
    from .state_dict import PREFIX as PACKED_PREFIX
    from .weights import plain, quantized
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "LIKE_KEY", "PACKED_PREFIX", "QuantizedConv1d", "QuantizedConv2d", "QuantizedConv3d", "QuantizedLayer",
    "QuantizedLinear", "empty_float_layer", "float_layer", "into_floats", "kind_of", "openvino", "openvino_memory",
    "packed_of", "packed_tensor", "plain", "quantized", "quantized_layer", "require_fit", "set_compute", "settings_of",
]  # fmt: skip

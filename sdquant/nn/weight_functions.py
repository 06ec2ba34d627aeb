"""Products with a weight that functions change each time it is used, as hosts do for LoRAs; the packed one stays.

The functions are in the layer's `weight_function` and `bias_function`: ComfyUI's and Forge Neo's names, which set them.
Each gets the dequantized values in memory of their own, which it may change in place, and returns those to use. A layer
without a bias has one of zeros for its `bias_function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.nn import functional as F

from ..kernels import dispatch, ops

if TYPE_CHECKING:
    from ..core import Geometry

Function = Callable[[Tensor], Tensor]


def changed_linear(layer: Any, x: Tensor) -> Tensor:
    """[..., in] -> [..., out]."""
    bias = _bias(layer, x)
    if not _computes(layer):
        return F.linear(x, _weight(layer, x), bias)
    y = cast("Tensor", ops.linear(x, _parts(layer, x), bias, layer._text, layer.compute or ""))
    return y if not layer.weight_function else y + F.linear(x, _difference(layer, x))


def changed_convolution(layer: Any, x: Tensor, geometry: Geometry) -> Tensor:
    """[b, in, *size] -> [b, out, *size]."""
    bias = _bias(layer, x)
    run: Any = dispatch.CONVOLUTIONS[len(geometry.stride) - 1]
    how = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
    if not _computes(layer):
        return cast("Tensor", run(x, _weight(layer, x), bias, *how))
    y = ops.convolved(x, _parts(layer, x), bias, layer._text, geometry, layer.compute)
    return cast("Tensor", y + run(x, _difference(layer, x), None, *how) if layer.weight_function else y)


def changed_embedding(layer: Any, indices: Tensor, like: Tensor) -> Tensor:
    """[...] of indices -> [..., width], in the dtype of `like`."""
    return F.embedding(indices, _weight(layer, like))


def _weight(layer: Any, x: Tensor) -> Tensor:
    """Return the weight as its functions change it, for activations like `x`."""
    return _changed(_decoded(layer, x), layer.weight_function)


def _bias(layer: Any, x: Tensor) -> Tensor | None:
    bias: Tensor | None = layer._bias(x)
    if not layer.bias_function:
        return bias
    own = x.new_zeros(layer.spec.shape[0]) if bias is None else bias.clone()
    return _changed(own, layer.bias_function)


def _changed(values: Tensor, functions: Sequence[Function]) -> Tensor:
    dtype = values.dtype
    for function in functions:
        values = function(values)
    return values.to(dtype)


def _difference(layer: Any, x: Tensor) -> Tensor:
    return _weight(layer, x) - _decoded(layer, x)


def _computes(layer: Any) -> bool:
    """Return whether the layer's product is not that with its dequantized weight: it rounds activations, too."""
    return layer.compute is not None or layer._backend.computes(layer.spec)


def _parts(layer: Any, x: Tensor) -> list[Tensor]:
    return [part.to(x.device) for part in layer._part_tensors()]


def _decoded(layer: Any, x: Tensor) -> Tensor:
    """Return the dequantized weight in new memory, in compiled graphs, too."""
    return cast("Tensor", ops.weight(_parts(layer, x), layer._text, x.dtype))

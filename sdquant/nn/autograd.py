"""Gradients of matrix products and convolutions with packed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import input_columns
from ..kernels import dispatch, hadamard, scratch

if TYPE_CHECKING:
    from ..core import Geometry, Packed, PackedLayout
    from .packed_layer import PackedLayer


def convolve(layer: Any, x: Tensor, bias: Tensor | None, how: Geometry) -> Tensor:
    """Convolve as the layer does, without a gradient."""
    return dispatch.convolve(layer._backend, layer._packed_for(x), layer._form, x, bias, how, layer.compute)


class Computed(torch.autograd.Function):
    """A product that the backend computes with the codes; the gradient is that with the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLayer, geometry: Geometry | None) -> Tensor:
        ctx.layer, ctx.geometry, ctx.form = layer, geometry, (x.shape, x.dtype)
        backend, packed = layer._backend, layer.packed
        return backend.linear(packed, x) if geometry is None else backend.convolve(packed, x, geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), (shape, dtype) = grads, ctx.form
        return _gradient(grad, ctx.layer.dequantize(dtype).to(grad.device), shape, ctx.geometry), None, None


class Decoded(torch.autograd.Function):
    """A product with the dequantized weight that saves no tensor: backward dequantizes the weight again.

    Saved for backward, the weights of all layers would be in memory as floats, and training a LoRA would take as much
    as on the unquantized model.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: Any, geometry: Geometry | None) -> Tensor:
        ctx.layer, ctx.geometry, ctx.shape = layer, geometry, x.shape
        done: Tensor = layer._linear(x, bias) if geometry is None else convolve(layer, x, bias, geometry)
        return done

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = _of_x(ctx.layer, grad, ctx.shape, ctx.geometry)
        if ctx.needs_input_grad[1]:
            channels = grad.dim() - 1 if ctx.geometry is None else grad.dim() - 1 - len(ctx.geometry.stride)
            others = [d for d in range(grad.dim()) if d != channels]
            of_bias = grad.sum(others) if others else grad  # torch sums over all where none are named
        return of_x, of_bias, None, None


def _of_x(layer: Any, grad: Tensor, shape: torch.Size, geometry: Geometry | None) -> Tensor:
    """Return the gradient of x [*shape]. Of a linear layer with a rotated weight, that of the rotated x is rotated: the
    weight itself would take as many rotations as it has outputs. So it is where inputs are gathered."""
    packed: Packed = layer._packed_for(grad)
    if input_columns.has_any(packed):
        codes = input_columns.without(packed)
        weight = _float_weight(layer, codes, layer._backend.form(codes), grad)
        return input_columns.spread(packed.to(grad.device), _gradient(grad, weight, shape, None))
    if geometry is not None or not packed.spec.rotation:
        return _gradient(grad, _float_weight(layer, packed, layer._form, grad), shape, geometry)
    codes = packed.without_rotation
    weight = _float_weight(layer, codes, layer._backend.form(codes), grad)
    return hadamard.rotate(_gradient(grad, weight, shape, None), packed.spec.rotation)


def _float_weight(layer: Any, packed: Packed, form: PackedLayout | None, grad: Tensor) -> Tensor:
    """Dequantize the weight on the device and in the dtype of `grad`; the packed weight may be offloaded elsewhere."""
    fresh = torch.is_grad_enabled() and grad.requires_grad  # the gradient of a gradient will need it later
    out = grad.new_empty(layer.spec.shape) if fresh else scratch(layer.spec.shape, grad.dtype, grad.device)
    dispatch.decode_into(layer._backend, packed.to(grad.device), form, out)
    return out


def _gradient(grad: Tensor, weight: Tensor, shape: torch.Size, how: Geometry | None) -> Tensor:
    """Return the gradient of x [*shape], where y = x weight^T or a convolution of x, and `grad` is that of y.

    It does not depend on x, so only the weight is needed.
    """
    if how is None:
        return grad @ weight
    if isinstance(how.padding, str):  # "same" may be uneven, which the gradient's own function cannot do
        with torch.enable_grad():
            x = torch.zeros(shape, dtype=grad.dtype, device=grad.device, requires_grad=True)
            conv: Any = dispatch.CONVOLUTIONS[len(how.stride) - 1]
            y = conv(x, weight, None, how.stride, how.padding, how.dilation, how.groups)
        return torch.autograd.grad(y, x, grad)[0]
    like, zeros = grad.new_empty(1).expand(shape), [0] * len(how.stride)
    mask = [True, False, False]
    result: Tensor = torch.ops.aten.convolution_backward(
        grad, like, weight, None, how.stride, how.padding, how.dilation, False, zeros, how.groups, mask
    )[0]
    return result

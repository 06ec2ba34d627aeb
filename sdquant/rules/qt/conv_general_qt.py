"""The convolution of quantized operands, and its gradients. Qwix at aa623acb, core/conv_general_qt.py.

As there, gradients without a bwd_qtype are those of the dequantized operands and are not clipped to ranges, unlike in
linear layers. Beyond Qwix, gradients have stochastic rounding and shards, weights can have tiles, and operands and
gradients can have zero points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels import int_matmul
from ..core.conv_general import CONVOLUTIONS, Window, as_floats, as_integers, convolve, patches, sums
from ..core.qarray import QArray, dequantize, floats
from ..core.qtypes import qtype
from . import gradients
from .saved_operands import Keeper, QtOperands, units, usable, without_zero_point

if TYPE_CHECKING:
    from ..qconfig import QtRule

Arguments = tuple[Any, Any, Any, int]  # torch's stride, padding, dilation and groups


def qt_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments, how: QtOperands) -> Tensor:
    """Convolve x [batch, channels, *space] with weight [out, channels / groups, *kernel]; add a float bias.

    Gradients, with rule.bwd_qtype: g is multiplied by the scales of the other operand, quantized (for x a scale for
    each sample, for the weight one for each output channel), and multiplied with the other's codes.
    """
    done = _Conv.apply(x, weight, bias, arguments, how)  # type: ignore[no-untyped-call]
    assert isinstance(done, Tensor)
    return done


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments, how: QtOperands
    ) -> Tensor:
        rule, codes_x, codes_weight = how.rule, how.x.quantized(x), how.weight.quantized(weight)
        keeper = Keeper()
        straight = rule.bwd_qtype is None
        for name, codes, original, needed, as_codes in (
            ("x", codes_x, x, ctx.needs_input_grad[1], usable(codes_x, None) and rule.bwd_weight_grad_shards != 0),
            ("weight", codes_weight, weight, ctx.needs_input_grad[0], usable(codes_weight, 1)),
        ):
            keeper.keep(name, (codes if straight or as_codes else original) if needed else None)
        ctx.save_for_backward(*keeper.tensors)
        ctx.keeper, ctx.rule, ctx.generator = keeper, rule, how.generator
        ctx.shapes = x.shape, weight.shape
        stride, padding, dilation, groups = arguments
        ctx.window = Window.of(weight.shape, stride, padding, dilation, groups)
        if isinstance(codes_x, Tensor):  # as a layer for inference does it: the bias goes into the sum
            return CONVOLUTIONS[ctx.window.space](x, floats(codes_weight), bias, stride, padding, dilation, groups)
        y = convolve(codes_x, codes_weight, stride=stride, padding=padding, dilation=dilation, groups=groups)
        return y if bias is None else y + bias.view(-1, *[1] * ctx.window.space)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, rule, window = ctx.saved_tensors, ctx.rule, ctx.window
        of_x = of_weight = of_bias = None
        with torch.autocast(g.device.type, enabled=False):
            x, weight = (ctx.keeper.get(name, saved) for name in ("x", "weight"))  # None if no gradient needs it
            if rule.bwd_qtype is None:
                x, weight = (None if one is None else floats(one) for one in (x, weight))
                of_x, of_weight = _float_for_both(g, x, weight, ctx.shapes, window)
            else:
                if weight is not None:
                    of_x = _for_x(g, weight, ctx.shapes, window, rule, ctx.generator)
                if x is not None:
                    of_weight = _for_weight(g, x, ctx.shapes, window, rule, ctx.generator)
            if ctx.needs_input_grad[2]:
                of_bias = g.transpose(0, 1).flatten(1).sum(1)
        return of_x, of_weight, of_bias, None, None


Shapes = tuple[torch.Size, torch.Size]  # of x and of the weight


def _for_x(
    g: Tensor, weight: Tensor | QArray, shapes: Shapes, window: Window, rule: QtRule, generator: torch.Generator | None
) -> Tensor:
    dtype, noise = g.dtype, gradients.noise_of(rule, g, generator)
    if isinstance(weight, QArray):
        g = g * weight.scale.reshape(1, -1, *[1] * window.space)
    codes = without_zero_point(gradients.quantized(g, rule, (0,), dtype=dtype, noise=noise))
    if not isinstance(weight, QArray) or not _has_sums(codes, weight):
        return _float_for_x(dequantize(codes), floats(_units(weight)), shapes, window)
    unit = units(weight)
    totals = _sums_for_x(codes.qvalue, unit.qvalue, (codes.qtype, unit.qtype), shapes, window)
    return (totals.to(codes.scale.dtype) * codes.scale).to(dtype)


def _for_weight(
    g: Tensor, x: Tensor | QArray, shapes: Shapes, window: Window, rule: QtRule, generator: torch.Generator | None
) -> Tensor:
    shards = rule.bwd_weight_grad_shards
    if shards == 0:
        return _float_for_weight(g, floats(x), shapes, window)
    dtype = g.dtype
    if isinstance(x, QArray):
        g = g * x.scale
    unit = _units(x)
    parts = []
    step = gradients.shard(len(g), shards or 1, "a convolution's weight", f"batch of {len(g)} is")
    for start in range(0, len(g), step):
        rows = slice(start, start + step)
        part = g[rows]
        noise = gradients.noise_of(rule, part, generator)
        codes = without_zero_point(gradients.quantized(part, rule, (1,), dtype=dtype, noise=noise))
        if not isinstance(unit, QArray) or not _has_sums(codes, unit):
            parts.append(_float_for_weight(dequantize(codes), floats(unit)[rows], shapes, window))
            continue
        totals = _sums_for_weight(codes.qvalue, unit.qvalue[rows], (codes.qtype, unit.qtype), shapes, window)
        scale = codes.scale.reshape(-1, 1, *[1] * window.space)
        parts.append((totals.to(scale.dtype) * scale).to(dtype))
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def _units(operand: Tensor | QArray) -> Tensor | QArray:
    return units(operand) if isinstance(operand, QArray) else operand


def _has_sums(*arrays: QArray) -> bool:
    """Return whether sums of codes are meaningful; those of table indices are not."""
    return all(qtype(array.qtype).kind in ("int", "float") for array in arrays)


def _float_for_x(g: Tensor, weight: Tensor, shapes: Shapes, window: Window) -> Tensor:
    """Return the gradient of the input, for float operands."""
    done = _float_for_both(g, None, weight, shapes, window)[0]
    assert done is not None
    return done


def _float_for_weight(g: Tensor, x: Tensor, shapes: Shapes, window: Window) -> Tensor:
    """Return the gradient of the weight, for float operands."""
    done = _float_for_both(g, x, None, shapes, window)[1]
    assert done is not None
    return done


def _float_for_both(
    g: Tensor, x: Tensor | None, weight: Tensor | None, shapes: Shapes, window: Window
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the input and the weight, for float operands; each is None unless the other operand is
    given."""
    mask = [weight is not None, x is not None, False]
    if x is None and weight is None:
        return None, None
    nothing = g.new_zeros(())  # torch only uses its shape
    x = nothing.expand(len(g), *shapes[0][1:]) if x is None else x.to(g.dtype)
    weight = nothing.expand(shapes[1]) if weight is None else weight.to(g.dtype)
    padding, even = [low for low, _ in window.edges], all(low == high for low, high in window.edges)
    if not even:
        x, padding = F.pad(x, window.around), [0] * window.space
    for_x, for_weight, _ = torch.ops.aten.convolution_backward(
        g, x, weight, None, window.stride, padding, window.dilation, False, [0] * window.space, window.groups, mask
    )
    return for_x if even or for_x is None else F.pad(for_x, [-size for size in window.around]), for_weight


def _sums_for_x(g: Tensor, taps: Tensor, types: tuple[str, str], shapes: Shapes, window: Window) -> Tensor:
    """Return the input's gradient [batch, channels, *space] from codes of g [batch, out, *places] and of a weight.

    Exact if both are integers.

    For integers it is the convolution of g, with zeros between its numbers if the stride is larger than 1, with the
    flipped kernel.
    """
    integer = all(qtype(name).kind == "int" for name in types)
    if not integer or window.groups > 1:
        left, right = as_floats(g, taps, types)
        done = _float_for_x(left, right, shapes, window)
        return as_integers(done) if integer else done
    sizes = [(size - 1) * step + 1 for size, step in zip(g.shape[2:], window.stride, strict=True)]
    apart = g.new_zeros([*g.shape[:2], *sizes])
    apart[(slice(None), slice(None), *(slice(None, None, step) for step in window.stride))] = g
    edges = []
    for axis, ((low, _), gap) in enumerate(zip(window.edges, window.dilation, strict=True)):
        reach = (taps.shape[2 + axis] - 1) * gap
        edges.append((reach - low, shapes[0][2 + axis] + low - apart.shape[2 + axis]))
    turned = taps.flip(tuple(range(2, taps.ndim))).transpose(0, 1)
    return sums(apart, turned, types, Window((1,) * window.space, tuple(edges), window.dilation, 1))


def _sums_for_weight(g: Tensor, codes: Tensor, types: tuple[str, str], shapes: Shapes, window: Window) -> Tensor:
    """Return the weight's gradient [out, channels / groups, *kernel] from codes of g [batch, out, *places] and of the
    input; exact if both are integers."""
    integer = all(qtype(name).kind == "int" for name in types)
    if not integer or window.groups > 1:
        left, right = as_floats(g, codes, types)
        done = _float_for_weight(left, right, shapes, window)
        return as_integers(done) if integer else done
    kernel, total, start = shapes[1][2:], torch.zeros((), dtype=torch.int64, device=g.device), 0
    for part in patches(codes, kernel, window):
        places = g.narrow(2, start, part.shape[1])
        start += part.shape[1]
        flat = part.reshape(places.numel() // places.shape[1], -1)
        total = total + int_matmul.product(places.transpose(0, 1).flatten(1), flat.T)
    return total.reshape(len(total), *kernel, -1).movedim(-1, 1)

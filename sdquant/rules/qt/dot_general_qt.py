"""The product of a linear layer with quantized operands, and its gradients: Qwix at aa623acb,
core/dot_general_qt.py."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.dot_general import linear
from ..core.qarray import QArray, floats
from . import gradients
from .saved_operands import Keeper, QtOperands, units, usable

if TYPE_CHECKING:
    from ..qconfig import QtRule


def qt_linear(x: Tensor, weight: Tensor, bias: Tensor | None, how: QtOperands) -> Tensor:
    """Multiply x [..., K] by weight [N, K] transposed, and add a float bias: [..., N].

    Gradients, without rule.bwd_qtype: those of the product of the float operands, zero where one lies outside a range
    that may be too narrow for it. With it: g is multiplied by the scales of the other operand, quantized, and
    multiplied by the other's codes; if that one has tiles, g itself is quantized and multiplied by the float operand.
    """
    done = _Linear.apply(x, weight, bias, how)  # type: ignore[no-untyped-call]
    assert isinstance(done, Tensor)
    return done


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: QtOperands) -> Tensor:
        rule, codes_x, codes_weight = how.rule, how.x.quantized(x), how.weight.quantized(weight)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        back, keeper = rule.bwd_qtype is not None, Keeper()
        for name, codes, original, needed, clips in (
            ("x", codes_x, x, needs_weight, needs_x and how.x.clips),
            ("weight", codes_weight, weight, needs_x, needs_weight and how.weight.clips),
        ):
            stays_float = name == "x" and rule.bwd_weight_grad_shards == 0  # the weight's gradient stays unquantized
            as_codes = back and not stays_float and usable(codes, -1)
            keeper.keep(f"codes of {name}", codes if needed and as_codes else None)
            keeper.keep(name, original if clips or (needed and not as_codes) else None)
        ctx.save_for_backward(*keeper.tensors)
        ctx.keeper, ctx.how = keeper, how
        if isinstance(codes_x, Tensor):  # as a layer for inference does it: the bias goes into the sum
            return F.linear(x, floats(codes_weight), bias)
        y = linear(codes_x, codes_weight)
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, how = ctx.saved_tensors, ctx.how
        x, codes_x, weight, codes_weight = (
            ctx.keeper.get(name, saved) for name in ("x", "codes of x", "weight", "codes of weight")
        )
        of_x = of_weight = of_bias = None
        with torch.autocast(g.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_x = _for_x(g, weight if codes_weight is None else codes_weight, how.rule, how.generator)
                of_x = how.x.clipped(of_x, x)
            if ctx.needs_input_grad[1]:
                of_weight = _for_weight(g, x if codes_x is None else codes_x, how.rule, how.generator)
                of_weight = how.weight.clipped(of_weight, weight)
            if ctx.needs_input_grad[2]:
                of_bias = g.reshape(-1, g.shape[-1]).sum(0)
        return of_x, of_weight, of_bias, None


def _for_x(g: Tensor, weight: Tensor | QArray, rule: QtRule, generator: torch.Generator | None) -> Tensor:
    """Multiply g [..., N] by weight [N, K]: [..., K]."""
    if rule.bwd_qtype is None:
        assert isinstance(weight, Tensor)
        return g @ weight
    dtype = g.dtype
    noise = gradients.noise_of(rule, g, generator)
    if isinstance(weight, QArray):
        g = g * weight.scale.reshape(-1)  # [N], or one for all
        other: QArray | Tensor = _turned(units(weight))
    else:
        other = weight.T
    return linear(gradients.quantized(g, rule, range(g.ndim - 1), dtype=dtype, noise=noise), other)


def _for_weight(g: Tensor, x: Tensor | QArray, rule: QtRule, generator: torch.Generator | None) -> Tensor:
    """Multiply g [..., N] transposed by x [..., K]: [N, K]."""
    shape = x.qvalue.shape if isinstance(x, QArray) else x.shape
    if rule.bwd_qtype is None or rule.bwd_weight_grad_shards == 0:
        assert isinstance(x, Tensor)
        return g.reshape(-1, g.shape[-1]).T @ x.reshape(-1, shape[-1])
    dtype = g.dtype
    noise = gradients.noise_of(rule, g, generator)
    other = x
    if isinstance(x, QArray):
        g = g * x.scale  # [..., 1]
        other = units(x)
    if rule.bwd_weight_grad_shards is not None:
        rows = g.shape[:-1].numel()
        tile: int | float | None = gradients.shard(rows, rule.bwd_weight_grad_shards, "a weight", f"{rows} rows are")
        g = g.reshape(-1, g.shape[-1])
    else:
        tile = rule.bwd_weight_grad_tile_size
    if g.ndim == 1:
        g = g[None]
    tiles = {} if tile is None else {g.ndim - 2: tile}
    codes = gradients.quantized(g, rule, (g.ndim - 1,), dtype=dtype, tiles=tiles, noise=noise)
    count = codes.scale.shape[-2]
    rows = codes.qvalue.shape[-2]
    left = replace(
        codes,
        qvalue=_columns(codes.qvalue, rows, count),
        scale=_columns(codes.scale, count, count),
        zero_point=None if codes.zero_point is None else _columns(codes.zero_point, count, count),
    )
    if isinstance(other, Tensor):
        return linear(left, _columns(other, rows, count))
    return linear(left, replace(other, qvalue=_columns(other.qvalue, rows, count), scale=other.scale.reshape(1, 1)))


def _columns(x: Tensor, rows: int, count: int) -> Tensor:
    """Reshape x [..., rows, C] to [C, count * ... * rows / count]: the summed axes last, each tile contiguous."""
    split = x.reshape(-1, count, rows // count, x.shape[-1])
    return split.permute(3, 1, 0, 2).reshape(x.shape[-1], -1)


def _turned(array: QArray) -> QArray:
    """Transpose a matrix without zero points and with one scale."""
    return replace(array, qvalue=array.qvalue.T)

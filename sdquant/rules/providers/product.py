"""The product of two activations under a rule, with gradients.

Forward: both operands are quantized, each with its own range, and multiplied (`batched_matmul.multiply`).
Backward: of the float product (quantization-aware training), or with quantized gradients where the rule has a
bwd_qtype. Formulas: Qwix at aa623acb, core/dot_general_qt.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import SettingsError
from ..core.batched_matmul import multiply, plain_precision, turned
from ..core.calibration import scale_and_zero_point
from ..core.dot_general import LEAST_TILE
from ..core.how_to_quantize import HowToQuantize, scale_shape
from ..core.qarray import QArray, dequantize, quantize_with, range_of
from ..core.qtypes import qtype
from ..core.static_range import StaticRange
from ..packed_layout import DEFAULT_METHOD, act_method, per_tensor
from ..qconfig import QtRule, QuantizationRule
from ..qt.gradients import noise_of, quantized
from ..qt.saved_operands import Operand

Found = dict[str, Tensor]
# Gets the name of an operand ("einsum0_lhs"), the range found in it, and the axis that is summed; returns the range to
# use. This is where statistics for static ranges are collected.
Collect = Callable[[str, Found, int], Found]
# Gets the name of an operand and returns its static range.
Known = Callable[[str], StaticRange]
Noise = Callable[[torch.Size], Tensor]


@dataclass(frozen=True, kw_only=True)
class Site:
    """One product in a model.

    Attributes:
        rule: what is done with it; has an act_qtype.
        name: of the operation in its module, "einsum0", which the names of its operands begin with.
        collect: see `Collect`; None uses each range as it is found. known: see `Known`; no range is looked for then.
    """

    rule: QuantizationRule
    name: str = "dot_general0"
    collect: Collect | None = None
    known: Known | None = None

    def __post_init__(self) -> None:
        refuse(self.rule, static=self.collect is not None or self.known is not None)

    @property
    def right_first(self) -> bool:
        """Return whether sums are scaled by the right operand's scales first, see `batched_matmul.multiply`."""
        return self.name.startswith("einsum")

    @property
    def by_row(self) -> bool:
        """Return whether the codes of a row depend neither on other rows nor on its position."""
        if self.known is not None:
            return self.rule.act_batch_axes is None
        return self.collect is None and not per_tensor(self.rule)

    def how(self, x: Tensor, axis: int) -> HowToQuantize:
        """Return the settings of an operand that is summed along `axis`: one scale per index of all other axes."""
        rule, summed = self.rule, axis % x.ndim
        return HowToQuantize(
            qtype=str(rule.act_qtype),
            channelwise_axes=() if per_tensor(rule) else tuple(n for n in range(x.ndim) if n != summed),
            tiled_axes={} if rule.tile_size is None else {summed: rule.tile_size},
            calibration_method=rule.act_calibration_method or DEFAULT_METHOD,
        )

    def quantized(self, x: Tensor, axis: int) -> tuple[QArray, Found]:
        """Quantize an operand; return it and its range. axis: -1 for the left operand, -2 for the right one."""
        how, name = self.how(x, axis), f"{self.name}_{'lhs' if axis == -1 else 'rhs'}"
        with torch.no_grad():
            if self.known is not None:
                static = fit_rule(self.known(name), x, how, name)
                return quantize_with(x, how.qtype, static.scale, static.zero_point), _limits(static, how)
            limits = range_of(x, how)
            if self.collect is not None:
                limits = self.collect(name, limits, axis)
            scale, zero_point = scale_and_zero_point(limits, how.row)
            return quantize_with(x, how.qtype, scale, zero_point), limits

    def clipped(self, gradient: Tensor, x: Tensor, limits: Found) -> Tensor:
        """Zero an operand's gradient where the operand lies outside its range, if that may be narrower."""
        rule = self.rule
        return Operand(rule.act_qtype, rule.act_calibration_method or DEFAULT_METHOD, limits).clipped(gradient, x)


def fit_rule(static: StaticRange, x: Tensor, how: HowToQuantize, name: str) -> StaticRange:
    """Return a static range with as many axes as x, on its device.

    Raises:
        SettingsError: it was calibrated for other tiles or other sizes.
    """
    expected = scale_shape(x.shape, how)
    shape = (*[1] * (x.ndim - static.scale.ndim), *static.scale.shape)
    tiled = [] if how.method.name == "fixed" else how.tiled_axes
    fits = len(shape) == x.ndim and all(
        size == expected[axis] or (size == 1 and axis not in tiled) for axis, size in enumerate(shape)
    )
    if not fits:
        raise SettingsError(
            f"Cannot use the static range of {name} for an activation of shape {list(x.shape)}",
            f"it was calibrated for scales of shape {list(static.scale.shape)}, but shape {list(expected)} is needed",
            "Calibrate again with these rules; the number of tiles and axes outside of act_batch_axes must not change",
        )
    zero_point = static.zero_point
    return StaticRange(
        static.scale.to(x.device).reshape(shape),
        None if zero_point is None else zero_point.to(x.device).reshape(shape),
    )


def _limits(static: StaticRange, how: HowToQuantize) -> Found:
    """Return the limits of a static range: {"absmax"}, or {"min", "max"} where it has a zero point."""
    if static.zero_point is None:
        return {"absmax": static.scale * how.row.bound}
    low, high = how.row.limits
    zero = static.zero_point.to(static.scale.dtype)
    return {"min": (low - zero) * static.scale, "max": (high - zero) * static.scale}


def refuse(rule: QuantizationRule, *, static: bool = False) -> None:
    """Raise if a rule asks for something that products of activations cannot do.

    Args:
        static: whether static ranges are collected, or known.

    Raises:
        SettingsError: no act_qtype, static ranges, or zero points on both sides.
    """
    what = f"Cannot quantize products by the rule for {rule.module_path!r} with op_names={list(rule.op_names)}"
    if rule.act_qtype is None:
        raise SettingsError(what, "the rule has no act_qtype", 'Set act_qtype, for example to "int8"')
    if rule.act_static_scale and not static:
        raise SettingsError(
            what,
            "act_static_scale needs a module that keeps the ranges, and this product is not in one",
            "Use quantize_model, or remove act_static_scale",
        )
    if act_method(rule).asymmetric and (
        rule.tile_size is None or (isinstance(rule.tile_size, int) and rule.tile_size >= LEAST_TILE)
    ):
        raise SettingsError(
            f"{what} and act_calibration_method={rule.act_calibration_method!r}",
            "the method gives both operands a zero point, but only one side of a product can have one",
            'Use a symmetric method such as "absmax" for these operations, in a rule of their own',
        )


def product(a: Tensor, b: Tensor, rule: QuantizationRule | Site) -> Tensor:
    """a [..., M, K] times b [..., K, N]: [..., M, N], both quantized as the rule says for activations.

    Each gets one scale for every row of a and column of b in every matrix, or one for every tile of rule.tile_size
    along K. Axes in front broadcast. float32, bfloat16 and float16 (whose scales are float32's); the result has the
    operands' dtype. Has gradients.

    Raises:
        SettingsError: what `refuse` says, a tile size that does not divide K, or two operands with zero points.
    """
    site = rule if isinstance(rule, Site) else Site(rule=rule)
    with plain_precision(a):
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
            done = _Product.apply(a, b, site)  # type: ignore[no-untyped-call]
            assert isinstance(done, Tensor)
            return done
        return multiply(site.quantized(a, -1)[0], site.quantized(b, -2)[0], right_first=site.right_first)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, site: Site) -> Tensor:
        left, found_a = site.quantized(a, -1)
        right, found_b = site.quantized(b, -2)
        ctx.site, ctx.founds = site, (found_a, found_b)
        ctx.save_for_backward(a, b)
        ctx.codes = (_residual(left, site.rule), _residual(right, site.rule))
        return multiply(left, right, right_first=site.right_first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        site, (found_a, found_b), (left, right) = ctx.site, ctx.founds, ctx.codes
        with plain_precision(grad):
            of_a = of_b = None
            if ctx.needs_input_grad[0]:
                other = b.mT if right is None else turned(right)
                done = _times(grad, other, site, _noise(site, grad))
                of_a = site.clipped(done.sum_to_size(a.shape), a, found_a)
            if ctx.needs_input_grad[1]:
                # The gradient of b transposed is grad transposed times a.
                other = a if left is None else left
                noise = _noise(site, grad)
                done = _times(grad.mT, other, site, None if noise is None else lambda shape: noise(shape).mT)
                of_b = site.clipped(done.mT.sum_to_size(b.shape), b, found_b)
        return of_a, of_b, None


def _residual(array: QArray, rule: QuantizationRule) -> QArray | None:
    """Return the quantized operand if the backward product uses its codes; None if it uses the float operand.

    Tiles lie along an axis that the backward product does not sum over, and not every code is a number.
    """
    if not isinstance(rule, QtRule) or rule.bwd_qtype is None:
        return None
    if rule.tile_size is not None or qtype(array.qtype).kind not in ("int", "float") or qtype(array.qtype).tile:
        return None
    if array.zero_point is not None:
        raise SettingsError(
            f"Cannot quantize gradients to {rule.bwd_qtype} for a product whose operands have a zero point",
            "the backward product multiplies their codes without subtracting zero points",
            'Use a symmetric calibration method such as "absmax"',
        )
    return array


def _noise(site: Site, grad: Tensor) -> Noise | None:
    """Return the noise of stochastic rounding, shaped like the gradient of the result or narrower; None without it."""
    return noise_of(site.rule, grad) if isinstance(site.rule, QtRule) else None


def _times(grad: Tensor, other: Tensor | QArray, site: Site, noise: Noise | None) -> Tensor:
    """Return grad [..., M, N] times other [..., N, K], with grad quantized if the rule has a bwd_qtype."""
    rule = site.rule
    if not isinstance(rule, QtRule) or rule.bwd_qtype is None:
        assert isinstance(other, Tensor)
        return grad @ other
    # The scales of the other operand are those of the summed axis: they go into the gradient, and its codes stay.
    scaled = grad if isinstance(other, Tensor) else grad.to(other.scale.dtype) * other.scale.mT
    codes = quantized(scaled, rule, range(grad.ndim - 1), dtype=grad.dtype, noise=noise)
    if isinstance(other, Tensor):
        return dequantize(codes) @ other
    ones = [1] * other.qvalue.ndim
    return multiply(codes, replace(other, scale=other.scale.new_ones(ones)))

"""GPTQ (arXiv 2210.17323): codes that make up for each other's errors, where the moments of a layer's inputs are known.

Columns are rounded one after another, those with the largest inputs first. What the rounding of one changes in the
layer's output is taken back by the columns that are still floats, as far as their inputs go with its own. Scales stay
those that the scheme's own encoder found, so that the result is a weight of the same format, only a better one: where
it is none, by the same moments, the encoder's own codes are kept.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ..core import GPTQ, Packed, hadamard, packed_rows
from ..kernels import hadamard as fast_hadamard
from ..utils.malloc_trim import trim
from ._code_levels import Levels, is_known, levels_of, with_codes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ..core import LowRank, PackedLayout, QuantSpec

_DAMPING = 0.01  # of the mean second moment, which every column counts as having more
_COLUMNS = 128  # whose errors are taken back at once in all that follow
WEIGHTS_AT_ONCE = 1 << 21  # rounded at a time; a few float32 numbers are kept of each
_PLACES, _ROWS = 4, 32  # in a weight and of each, that show whether codes have become better


def encode(weight: Tensor, spec: QuantSpec) -> Packed:
    """Quantize a weight [out, in, ...] as its scheme does and, with the option for that, choose its codes anew.

    It is left as the scheme's own encoder has it where calibration saw no input, or measured each input alone.
    """
    packed = spec.scheme.codec.encode(weight, spec)
    if GPTQ not in spec.scheme.options or not spec[GPTQ]:
        return packed
    moments = spec.second_moments(weight[0].numel())
    if moments is None or moments.shape[1] == 1:
        return packed
    moments = moments.to(weight.device, torch.float32)
    if packed.spec.rotation:
        moments = _rotated_moments(moments, packed.spec.rotation, weight[0].numel())
    codes = packed.without_rotation
    branch = packed.spec.scheme.codec.low_rank(codes)
    target = _Target(weight, packed.spec.rotation, codes, branch)
    if branch is not None:
        moments = moments if target.smooth is None else _divided(moments, target.smooth)
        codes = Packed(spec=codes.spec, parts=branch.residual_of(codes.parts))
    form = codes.spec.scheme.codec.form(codes)
    if form is None or not is_known(form):
        return packed
    trim()  # what the encoder needed
    factors = _factors(moments, form.columns)
    rounded = _rounded(codes, form, target, factors)
    if not _noise(rounded, form, target, factors) < _noise(codes, form, target, factors):
        return packed
    return replace(packed, parts={**packed.parts, form.codes: rounded.parts[form.codes]})


def unexplained(moments: Tensor, columns: int, rotation: int = 0) -> Tensor:
    """Return the mean square of each input that the inputs rounded after it do not tell: float32 [columns].

    An error e in column i makes noise of e^2 times that once the columns after it have taken back what they can,
    instead of e^2 times the mean square of its input.

    Args:
        moments: see `QuantSpec.second_moments`. columns: of the weight. rotation: of codes of a rotated weight, whose
            columns it is then about.
    """
    is_by_block = not rotation or moments.shape[1] % rotation == 0
    moments = moments if is_by_block else _rotated_moments(moments, rotation, columns)
    squares, width = moments.new_zeros(len(moments) * moments.shape[1]), moments.shape[1]
    for number, whole in enumerate(moments):
        whole = _rotated_moments(whole[None].clone(), rotation, columns)[0] if rotation and is_by_block else whole
        block = whole[: columns - number * width, : columns - number * width]
        order = block.diagonal().argsort(descending=True, stable=True).flip(0)
        squares[number * width + order] = _squared_pivots(block, order).to(squares)
    return squares[:columns]


def _squared_pivots(moments: Tensor, order: Tensor) -> Tensor:
    """Return the squares of the diagonal of the Cholesky factor of moments [n, n] in an order: floats [n].

    In single precision if that goes, which takes two thirds of the time: with damping, and small inputs before large
    ones, the squares are off by a hundred thousandth.
    """
    values = moments[order][:, order].float()
    if values.device.type in ("cpu", "cuda") and bool((mean := values.diagonal().mean()) > 0):
        values.diagonal().add_(mean * _DAMPING)
        lower, failed = torch.linalg.cholesky_ex(values)
        if not failed:
            return cast("Tensor", lower).diagonal().square()
    return _lower_factor(moments, order).diagonal().square()


class _Target:
    """The float32 rows that codes are to stand for: rotated, without the branch. Made when they are asked for."""

    def __init__(self, weight: Tensor, rotation: int, codes: Packed, branch: LowRank | None) -> None:
        self._weight, self._rotation = weight.detach(), rotation
        self._up = self._down = self.smooth = None
        if branch is not None:
            down = codes.parts[branch.down].float()
            self._up, self._down = codes.parts[branch.up].float(), down if branch.is_turned else down.T
            self.smooth = codes.parts[branch.smooth].float() if branch.smooth else None

    def __call__(self, start: int, stop: int) -> Tensor:
        rows = self._weight[start:stop].reshape(stop - start, -1).float()
        if self._rotation:
            rows = hadamard.rotate_by_matrix(rows, self._rotation)
        if self._up is not None and self._down is not None:
            rows = torch.addmm(rows, self._up[start:stop], self._down, alpha=-1)
        return rows if self.smooth is None else rows * self.smooth


def _rotated_moments(moments: Tensor, size: int, columns: int) -> Tensor:
    """Return the moments of inputs that are rotated in groups of `size`.

    Blocks of moments that end within a group are joined, as many as end where a group does: what lies between them is
    unknown, and zero here. Others are changed in place, one after another: of a wide layer all together are many bytes.
    """
    width = moments.shape[1]
    if width % size == 0:
        for block in moments:
            block.copy_(fast_hadamard.rotate(fast_hadamard.rotate(block, size).T.contiguous(), size))
        return moments
    if len(moments) > 1:
        whole = math.lcm(width, size)
        some = [torch.block_diag(*each) for each in moments.split(whole // width)]  # type: ignore[no-untyped-call]
        moments = torch.stack([torch.nn.functional.pad(one, (0, whole - len(one)) * 2) for one in some])
    else:
        moments = moments[:, :columns, :columns]
    turned = fast_hadamard.rotate(moments, size)
    return fast_hadamard.rotate(turned.transpose(1, 2).contiguous(), size)


def _divided(moments: Tensor, smooth: Tensor) -> Tensor:
    """Return the moments of inputs that are divided by `smooth` [in]."""
    width = len(moments) * moments.shape[1]
    inverse = torch.nn.functional.pad(smooth.reciprocal(), (0, width - len(smooth))).view(len(moments), -1)
    return moments * inverse.unsqueeze(2) * inverse.unsqueeze(1)


def _factors(moments: Tensor, columns: int) -> list[tuple[Tensor, Tensor]]:
    """Return for each block of columns their order, and the upper Cholesky factor of the inverse of their moments.

    Args:
        moments: which the factors take the place of. columns: of the weight; the last block may be for more.
    """
    factors, width = [], moments.shape[1]
    for number, whole in enumerate(moments):
        block = whole[: columns - number * width, : columns - number * width]
        order = block.diagonal().argsort(descending=True, stable=True)
        inverse = torch.cholesky_inverse(_lower_factor(block, order))
        factors.append((order, block.copy_(torch.linalg.cholesky(inverse, upper=True))))
        del inverse
        trim()  # of each block several copies in float64, which the C library would keep beside the next one's
    return factors


def _lower_factor(moments: Tensor, order: Tensor) -> Tensor:
    """Return the lower Cholesky factor, float64, of moments [n, n] in an order, with as much damping as that takes."""
    values = moments[order][:, order]
    values = (values if values.device.type in ("cpu", "cuda") else values.cpu()).double()  # others may have none
    mean = values.diagonal().mean()
    damping = float(mean) * _DAMPING if mean > 0 else 1.0
    while True:
        values.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(values)
        if not failed:
            return cast("Tensor", lower)
        damping *= 10


def _rounded(
    packed: Packed, form: PackedLayout, target: Callable[[int, int], Tensor], factors: list[tuple[Tensor, Tensor]]
) -> Packed:
    """Return the packed weight with new codes. `target(start, stop)`: the rows they are for, float32 [n, columns]."""
    codec, rows = packed.spec.scheme.codec, form.rows
    step = max(1, WEIGHTS_AT_ONCE // form.columns) if codec.by_row(packed) else rows
    new = torch.empty_like(packed.parts[form.codes], memory_format=torch.contiguous_format)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        some = packed if step >= rows else packed_rows.cut(packed, [(start, stop)])
        here = replace(form, rows=stop - start)
        levels, values, first = levels_of(some, here), target(start, stop), 0
        codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
        for order, upper in factors:
            columns = first + order
            codes[:, columns] = _round_columns(values, levels, columns, upper)
            first += len(order)
        some = with_codes(some, here, codes)
        if step >= rows:
            return some
        new.view(rows, -1)[start:stop] = some.parts[form.codes].reshape(stop - start, -1)
        del levels, values, codes, some
        trim()
    return Packed(spec=packed.spec, parts={**packed.parts, form.codes: new})


def _noise(
    packed: Packed, form: PackedLayout, target: Callable[[int, int], Tensor], factors: list[tuple[Tensor, Tensor]]
) -> float:
    """Return how much noise some rows make in the layer's output: dW H dW^T, with H as its factors have it."""
    codec, rows, total = packed.spec.scheme.codec, form.rows, 0.0
    ranges = [(at * rows // _PLACES, min(at * rows // _PLACES + _ROWS, rows)) for at in range(_PLACES)]
    if rows <= _PLACES * _ROWS or not codec.by_row(packed):
        ranges = [(0, rows)]
    for start, stop in ranges:
        some = packed if stop - start == rows else packed_rows.cut(packed, [(start, stop)])
        errors = codec.decode(some, torch.float32).reshape(stop - start, -1) - target(start, stop)
        first = 0
        for order, upper in factors:
            # H is the inverse of U^T U, hence dW H dW^T = |dW U^-1|^2.
            part = torch.linalg.solve_triangular(upper, errors[:, first + order], upper=True, left=False)
            total += float(part.square().sum(dtype=torch.float64))
            first += len(order)
    return total


def _round_columns(target: Tensor, levels: Levels, columns: Tensor, upper: Tensor) -> Tensor:
    """Return the codes of some columns, in this order: uint8 [rows, columns]."""
    values = target.T[columns].contiguous()  # [columns, rows], so that a column is contiguous
    low, step = levels.low.T[columns], levels.step.T[columns]
    step = torch.where(step == 0, torch.ones_like(step), step)  # where all codes have the same value
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    nearest = Nearest(levels.table)
    for start in range(0, len(values), _COLUMNS):
        stop = min(start + _COLUMNS, len(values))
        some, inner = values[start:stop], upper[start:stop, start:stop]
        errors = torch.empty_like(some)
        for at in range(stop - start):
            place = (some[at] - low[start + at]).div_(step[start + at])
            code, position = nearest(place)
            codes[start + at] = code
            error = torch.addcmul(some[at] - low[start + at], position, step[start + at], value=-1)
            errors[at] = error.div_(inner[at, at])
            some[at + 1 :].addr_(inner[at, at + 1 :], errors[at], alpha=-1)
        values[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    return codes.T


class Nearest:
    """The nearest of the positions in a table, and its code."""

    def __init__(self, table: Tensor) -> None:
        self._last = len(table) - 1
        self._is_plain = torch.equal(table, torch.arange(len(table), dtype=table.dtype, device=table.device))
        self._positions, self._codes = table.sort(stable=True)
        self._between = (self._positions[1:] + self._positions[:-1]) / 2

    def __call__(self, place: Tensor) -> tuple[Tensor, Tensor]:
        if self._is_plain:
            position = place.round_().clamp_(0, self._last)
            return position, position
        at = torch.bucketize(place, self._between)
        return self._codes[at], self._positions[at]

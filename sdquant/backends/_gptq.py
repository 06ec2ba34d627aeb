"""GPTQ (arXiv 2210.17323): codes that make up for each other's errors, where the moments of a layer's inputs are known.

Columns are rounded one after another, those with the largest inputs first. What the rounding of one changes in the
layer's output is taken back by the columns that are still floats, as far as their inputs go with its own. Scales stay
those that the weight has, so that the result is a weight of the same format, only a better one: where it is none, by
the same moments, the codes are kept that it had.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ..core import Packed, packed_rows
from ..kernels import hadamard as fast_hadamard
from ..utils.malloc_trim import trim
from ._code_levels import is_known
from ._new_codes import Nearest, RowTarget, with_new_codes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ..core import PackedLayout, QuantSpec
    from ._code_levels import Levels

_DAMPING = 0.01  # of the mean second moment, which every column counts as having more
_COLUMNS = 128  # whose errors are taken back at once in all that follow
_PLACES, _ROWS = 4, 32  # in a weight and of each, that show whether codes have become better


def choose_codes(weight: Tensor, packed: Packed, spec: QuantSpec) -> Packed:
    """Return the packed form of a weight [out, in, ...] with codes that are chosen anew.

    It is left as it is where calibration saw no input, or measured each input alone.
    """
    moments = spec.second_moments(weight[0].numel())
    if moments is None or moments.shape[1] == 1:
        return packed
    moments = moments.to(weight.device, torch.float32)
    if packed.spec.rotation:
        moments = rotated_moments(moments, packed.spec.rotation, weight[0].numel())
    codes = packed.without_rotation
    branch = packed.spec.scheme.codec.low_rank(codes)
    target = RowTarget(weight, packed.spec.rotation, codes, branch)
    if branch is not None:
        moments = moments if target.smooth is None else _divided(moments, target.smooth)
        codes = Packed(spec=codes.spec, parts=branch.residual_of(codes.parts))
    form = codes.spec.scheme.codec.form(codes)
    if form is None or not is_known(form):
        return packed
    trim()  # what the encoder needed
    factors = _factors(moments, form.columns)
    rounded = with_new_codes(codes, form, target, lambda values, levels: _round_rows(values, levels, factors))
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
    moments = moments if is_by_block else rotated_moments(moments, rotation, columns)
    squares, width = moments.new_zeros(len(moments) * moments.shape[1]), moments.shape[1]
    for number, whole in enumerate(moments):
        whole = rotated_moments(whole[None].clone(), rotation, columns)[0] if rotation and is_by_block else whole
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


def rotated_moments(moments: Tensor, size: int, columns: int) -> Tensor:
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


def _round_rows(values: Tensor, levels: Levels, factors: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the codes of rows, float32 [n, columns]: uint8 of that shape."""
    codes, first = torch.empty(values.shape, dtype=torch.uint8, device=values.device), 0
    for order, upper in factors:
        columns = first + order
        codes[:, columns] = _round_columns(values, levels, columns, upper)
        first += len(order)
    return codes


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

"""GPTQ (arXiv 2210.17323): codes that make up for each other's errors, where the moments of a layer's inputs are known.

Columns are rounded one after another, those with the largest inputs first. What the rounding of one changes in the
layer's output is taken back by the columns that are still floats, as far as their inputs go with its own. Scales stay
those that the scheme's own encoder found, so that the result is a weight of the same format, only a better one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..core import GPTQ, Packed, hadamard, packed_rows
from ._code_levels import Levels, is_known, levels_of, with_codes

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import PackedLayout, QuantSpec

_DAMPING = 0.01  # of the mean second moment, which every column counts as having more
_COLUMNS = 128  # whose errors are taken back at once in all that follow
WEIGHTS_AT_ONCE = 1 << 22  # rounded at a time; a few float32 numbers are kept of each


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
    target = weight.detach().reshape(weight.shape[0], -1).float()
    moments = moments.to(target.device, torch.float32)
    if packed.spec.rotation:
        target, moments = _rotated(target, moments, packed.spec.rotation)
    codes = packed.without_rotation
    branch = packed.spec.scheme.codec.low_rank(codes)
    if branch is not None:
        down = codes.parts[branch.down].float()
        up = codes.parts[branch.up].float()
        target = torch.addmm(target, up, down if branch.is_turned else down.T, alpha=-1)
        if branch.smooth:
            smooth = codes.parts[branch.smooth].float()
            target, moments = target.mul_(smooth), _divided(moments, smooth)
        codes = Packed(spec=codes.spec, parts=branch.residual_of(codes.parts))
    form = codes.spec.scheme.codec.form(codes)
    if form is None or not is_known(form):
        return packed
    rounded = _rounded(codes, form, target, _factors(moments, form.columns))
    return replace(packed, parts={**packed.parts, form.codes: rounded.parts[form.codes]})


def expected_noise(noise: Tensor, moments: Tensor, rotation: int) -> Tensor:
    """Return what is left of dW_o H dW_o^T by codes that make up for each other's errors, by row: [rows].

    Each column is off by as much as in `noise`, whose columns were rounded alone; what its error means for the output
    is what the columns that come after it cannot take back, the conditional variance of its input given theirs.

    Args:
        noise: float32 [rows, columns]. moments: see `QuantSpec.second_moments`. rotation: of the packed weight, or 0.
    """
    moments = moments.to(noise.device, torch.float32)
    if rotation:
        noise, moments = _rotated(noise, moments, rotation)
    total, first = torch.zeros(len(noise), device=noise.device), 0
    for block in moments:
        block = block[: noise.shape[1] - first, : noise.shape[1] - first]
        order = block.diagonal().argsort(descending=True, stable=True)
        values = block[order.flip(0)][:, order.flip(0)].double()
        mean = float(values.diagonal().mean())
        damping = mean * _DAMPING if mean > 0 else 1.0
        while True:
            values.diagonal().add_(damping)
            lower, failed = torch.linalg.cholesky_ex(values)
            if not failed:
                break
            damping *= 10
        left = lower.diagonal().square().flip(0).float()
        total += noise[:, first + order].square() @ left
        first += len(order)
    return total


def _rotated(weight: Tensor, moments: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the weight and the moments of its inputs, both rotated in groups of `size`.

    Blocks of moments that end within a group are joined: what lies between them is unknown, and zero here.
    """
    if moments.shape[1] % size:
        joined: Tensor = torch.block_diag(*moments)  # type: ignore[no-untyped-call]
        moments = joined[: weight.shape[1], : weight.shape[1]].unsqueeze(0)
    turned = hadamard.rotate_by_matrix(moments, size)
    turned = hadamard.rotate_by_matrix(turned.transpose(1, 2).contiguous(), size)
    return hadamard.rotate_by_matrix(weight, size), turned


def _divided(moments: Tensor, smooth: Tensor) -> Tensor:
    """Return the moments of inputs that are divided by `smooth` [in]."""
    width = len(moments) * moments.shape[1]
    inverse = torch.nn.functional.pad(smooth.reciprocal(), (0, width - len(smooth))).view(len(moments), -1)
    return moments * inverse.unsqueeze(2) * inverse.unsqueeze(1)


def _factors(moments: Tensor, columns: int) -> list[tuple[Tensor, Tensor]]:
    """Return for each block of columns their order, and the upper Cholesky factor of the inverse of their moments.

    Args:
        columns: of the weight; the last block may be for more.
    """
    factors, width = [], moments.shape[1]
    for number, block in enumerate(moments):
        block = block[: columns - number * width, : columns - number * width]
        order = block.diagonal().argsort(descending=True, stable=True)
        values = block[order][:, order]
        values = (values if values.device.type in ("cpu", "cuda") else values.cpu()).double()  # others may have none
        mean = values.diagonal().mean()
        damping = float(mean) * _DAMPING if mean > 0 else 1.0
        while True:
            values.diagonal().add_(damping)
            lower, failed = torch.linalg.cholesky_ex(values)
            if not failed:
                break
            damping *= 10
        upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
        factors.append((order, upper.float().to(moments.device)))
    return factors


def _rounded(packed: Packed, form: PackedLayout, target: Tensor, factors: list[tuple[Tensor, Tensor]]) -> Packed:
    """Return the packed weight with new codes for `target`, float32 [rows, columns]."""
    codec, rows = packed.spec.scheme.codec, form.rows
    step = max(1, WEIGHTS_AT_ONCE // form.columns) if codec.by_row(packed) else rows
    codes = torch.empty(rows, form.columns, dtype=torch.uint8, device=target.device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        some = packed if step >= rows else packed_rows.cut(packed, [(start, stop)])
        levels = levels_of(some, replace(form, rows=stop - start))
        first = 0
        for order, upper in factors:
            columns = first + order
            codes[start:stop, columns] = _round_columns(target[start:stop], levels, columns, upper)
            first += len(order)
    return with_codes(packed, form, codes)


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

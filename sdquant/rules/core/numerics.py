"""Rounding to the types, and decoding, as in Qwix at aa623acb, core/numerics.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core import code_tables
from ...utils.device_constants import constant

if TYPE_CHECKING:
    from .qtypes import QType

PART = 1 << 15  # numbers


def storage(row: QType) -> torch.dtype:
    """Return the dtype of a type's codes."""
    dtype = getattr(torch, row.storage)
    assert isinstance(dtype, torch.dtype)
    return dtype


def to_codes(x: Tensor, row: QType, noise: Callable[[torch.Size], Tensor] | None = None) -> Tensor:
    """Round numbers in units of the scale to codes of the type, with saturation.

    Args:
        x: any float dtype and shape.
        noise: for stochastic rounding of integers: returns float32 noise of a shape, which is added before rounding.

    Returns:
        Codes of `row.storage`, shaped like x.
    """
    if row.kind == "nf4":
        return _nearest(x, code_tables.NF4)
    if row.kind == "e2m1":
        return _to_e2m1(x)
    low, high = row.limits
    if row.kind == "float":
        return x.clamp(low, high).to(storage(row))
    if noise is not None:
        x = x.float() + noise(x.shape)  # in bfloat16 the sum itself would be rounded, and not evenly
    # XLA's cast saturates and takes NaN for 0; torch's would wrap.
    return torch.round(x).float().nan_to_num_(nan=0.0).clamp_(low, high).to(storage(row))


def from_codes(codes: Tensor, row: QType, dtype: torch.dtype) -> Tensor:
    """Decode codes to numbers in units of the scale, as `dtype`."""
    if row.kind == "nf4":
        return _levels(code_tables.NF4, codes.device, torch.float32)[codes.long()].to(dtype)
    if row.kind == "e2m1":
        return _levels((*code_tables.E2M1_LEVELS, *(-one for one in code_tables.E2M1_LEVELS)), codes.device, dtype)[
            codes.long()
        ]
    return codes.to(dtype)


@constant
def _levels(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _nearest(x: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Return the index of the nearest level, on ties the lower one. Distances are in float32; NaN gives 0."""
    borders = _borders(levels)

    def of_part(part: Tensor) -> Tensor:
        codes = torch.zeros(part.shape, dtype=torch.uint8, device=part.device)
        for border in borders:
            codes += part >= border
        return codes

    return _by_parts(x, of_part)


@cache
def _borders(levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return, for each level but the first, the least float32 that is nearer to it than to the level before."""
    borders = []
    low, up = (torch.tensor(end, dtype=torch.float32, device="cpu") for end in (-torch.inf, torch.inf))
    for below, above in itertools.pairwise(torch.tensor(levels, dtype=torch.float32, device="cpu")):
        border = (below + above) / 2
        while (above - border).abs() < (border - below).abs():
            border = torch.nextafter(border, low)
        while not (above - border).abs() < (border - below).abs():
            border = torch.nextafter(border, up)
        borders.append(float(border))
    return tuple(borders)


def _to_e2m1(x: Tensor) -> Tensor:
    """Return e2m1 codes: the nearest magnitude, ties to the even code, saturated, below a sign bit."""
    return _by_parts(x, _e2m1_of)


def _e2m1_of(part: Tensor) -> Tensor:
    magnitude = part.abs()
    codes = torch.zeros(part.shape, dtype=torch.uint8, device=part.device)
    for index, (below, above) in enumerate(itertools.pairwise(code_tables.E2M1_LEVELS)):
        border = (below + above) / 2
        # The upper of the two has an odd index where the lower has an even one: a tie stays below then.
        codes += magnitude > border if index % 2 == 0 else magnitude >= border
    return codes | (torch.signbit(part).to(torch.uint8) << 3)


def _by_parts(x: Tensor, codes_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return uint8 codes of x, computed in float32 chunks that stay in a CPU's cache."""
    if x.device.type != "cpu" or x.numel() <= PART:
        return codes_of(x.float())
    flat = x.reshape(-1)
    out = flat.new_empty(flat.shape, dtype=torch.uint8)
    for part, to in zip(torch.split(flat, PART), torch.split(out, PART), strict=True):
        to.copy_(codes_of(part.float()))
    return out.view(x.shape)

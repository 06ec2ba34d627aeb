"""Rounding into the types, and back: Qwix's (0.1.8, core/numerics.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backends._bnb_tables import NF4

if TYPE_CHECKING:
    from .qtypes import QType

# The magnitudes of E2M1, of the OCP Microscaling formats 1.0; bit 3 of a code is the sign.
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def storage(row: QType) -> torch.dtype:
    """The dtype of a type's codes."""
    dtype = getattr(torch, row.storage)
    assert isinstance(dtype, torch.dtype)
    return dtype


def to_codes(x: Tensor, row: QType, noise: Callable[[torch.Size], Tensor] | None = None) -> Tensor:
    """Numbers in units of the scale, rounded into the type and saturated.

    Args:
        x: any float dtype and shape.
        noise: for stochastic rounding of integers: gives float32 of a shape, which is added before rounding.

    Returns:
        Codes of `row.storage`, shaped like x.
    """
    if row.kind == "nf4":
        return _nearest(x, NF4)
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
    """What the codes stand for, in units of the scale, as `dtype`."""
    if row.kind == "nf4":
        return torch.tensor(NF4, dtype=torch.float32, device=codes.device)[codes.long()].to(dtype)
    if row.kind == "e2m1":
        levels = torch.tensor((*E2M1_LEVELS, *(-one for one in E2M1_LEVELS)), dtype=dtype, device=codes.device)
        return levels[codes.long()]
    return codes.to(dtype)


def _nearest(x: Tensor, levels: tuple[float, ...]) -> Tensor:
    """The index of the nearest level, the lower of two that are as near. Distances are float32's."""
    table = torch.tensor(levels, dtype=torch.float32, device=x.device)
    best = (x.float() - table[0]).abs()
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for index in range(1, len(levels)):
        distance = (table[index] - x.float()).abs()
        nearer = distance < best
        codes = torch.where(nearer, torch.full_like(codes, index), codes)
        best = torch.where(nearer, distance, best)
    return codes


def _to_e2m1(x: Tensor) -> Tensor:
    """The nearest magnitude, ties to the even code, saturated; a sign bit above it."""
    magnitude = x.float().abs()
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for index, (below, above) in enumerate(itertools.pairwise(E2M1_LEVELS)):
        border = (below + above) / 2
        # The upper of the two has an odd index where the lower has an even one: a tie stays below then.
        codes += (magnitude > border if index % 2 == 0 else magnitude >= border).to(torch.uint8)
    return codes | (torch.signbit(x).to(torch.uint8) << 3)

"""Unpack signed codes in groups of columns: torchao's, ModelOpt's and compressed-tensors' int-quantized ones.

In memory codes are unsigned: half of the range is added to them, and to zero points that are in the range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import dtype_name
from ._bnb_codec import bad, require, scales
from ._comfy_int4 import SIGNS
from ._hub_codes import packed
from ._hub_find import BYTES, GROUP_SIZE, HIGH_FIRST, NIBBLES, PACKING, PAIRS
from ._hub_unpacked import Get, Size, Unpacked

if TYPE_CHECKING:
    from ..core import PrequantizedWeight


def unpack(weight: PrequantizedWeight, bits: int, size: Size | None, get: Get) -> Unpacked:
    """Read and unpack a weight that was found in one of the four packings that `_hub_find` describes."""
    packing, group = weight.details[PACKING], weight.details[GROUP_SIZE]
    codes = _codes(*require(weight, "codes", get), bits, packing)
    rows, columns = len(codes), codes.shape[1] * 8 // bits
    if type(group) is not int or group < 1 or columns % group:
        raise bad(weight.name, f"its group size is {group!r:.40}, which does not divide its {columns} columns")
    grid = (rows, columns // group)
    shift = _grid(*require(weight, "shift", get), grid, packing) if "shift" in weight.keys else None
    return Unpacked(
        codes=codes,
        scale=_scale(*require(weight, "scale", get), grid, packing),
        zero=_zero(*require(weight, "zero", get), grid, bits) if "zero" in weight.keys else None,
        shift=None if shift is None else -shift.float(),  # which torchao adds
        columns=_columns(*require(weight, "columns", get), columns) if "columns" in weight.keys else None,
        groups=(weight.keys["order"], get(weight.keys["order"])) if "order" in weight.keys else None,
    )


def _codes(key: str, stored: Tensor, bits: int, packing: str) -> Tensor:
    known = {BYTES: (torch.int8,), NIBBLES: (torch.int8, torch.uint8)}.get(packing, (torch.uint8,))
    if stored.dtype not in known or stored.ndim != 2 or not stored.numel():
        raise bad(key, f"it is {dtype_name(stored.dtype)} {list(stored.shape)}, not a matrix of {dtype_name(known[0])}")
    if packing == NIBBLES:
        return stored.view(torch.uint8) ^ SIGNS
    if packing == HIGH_FIRST:
        return stored << 4 | stored >> 4
    if packing == PAIRS:
        flipped = stored ^ SIGNS
        return packed(torch.stack((flipped & 15, flipped >> 4), dim=1).flatten(0, 1), 4)
    middle = 1 << bits - 1
    low, high = (bound.item() for bound in torch.aminmax(stored))
    if low < -middle or high >= middle:
        raise bad(key, f"it has codes from {low} to {high}, but they are said to have {bits} bits")
    return packed(stored.contiguous().view(torch.uint8) + middle, bits)  # which wraps around


def _scale(key: str, stored: Tensor, grid: tuple[int, int], packing: str) -> Tensor:
    scale = _grid(key, stored, grid, packing)
    if bool((scale < 0).any()):
        raise bad(key, "it is the scale of a quantized weight, and has negative values")
    if packing != HIGH_FIRST:
        return scale
    if bool((scale == 0).any()):
        raise bad(key, "a scale that codes are divided by is zero")
    # ModelOpt divides by it. Of a group of zeros it is infinite, which `scales` has refused.
    return 1 / scale.float()


def _grid(key: str, stored: Tensor, grid: tuple[int, int], packing: str) -> Tensor:
    """Return a value for each group, [*grid], in the dtype of the file."""
    scales(key, stored)
    if packing == HIGH_FIRST and stored.numel() == grid[0] * grid[1]:
        return stored.reshape(grid)
    return _spread(key, stored.T if packing == NIBBLES and stored.ndim == 2 else stored, grid)


def _spread(key: str, values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return values [*grid] of those that several rows may share."""
    if values.ndim < 2 and values.numel() in (1, grid[0]) and grid[1] == 1:
        values = values.reshape(-1, 1)
    if values.ndim != 2 or not len(values) or values.shape[1] != grid[1] or grid[0] % len(values):
        raise bad(key, f"its shape is {list(values.shape)}, but the weight has {grid[0]} rows of {grid[1]} groups")
    return values.repeat_interleave(grid[0] // len(values), 0).contiguous()


def _zero(key: str, stored: Tensor, grid: tuple[int, int], bits: int) -> Tensor | None:
    """Return the zero points: None if all are zero, integers if all are in the range of the codes, else floats."""
    if not stored.is_floating_point() and stored.dtype != torch.int8:
        raise bad(key, f"zero points must be int8 or floats, but these are {dtype_name(stored.dtype)}")
    zero = _spread(key, scales(key, stored) if stored.is_floating_point() else stored.float(), grid)
    if not bool(zero.any()):
        return None
    middle = 1 << bits - 1
    exact = bool(((zero == zero.round()) & (zero >= -middle) & (zero < middle)).all())
    return zero.add_(middle).to(torch.uint8) if exact else zero


def _columns(key: str, stored: Tensor, columns: int) -> Tensor:
    factors = scales(key, stored).reshape(-1)
    if factors.numel() != columns:
        raise bad(key, f"it has {factors.numel()} values, but the weight has {columns} columns")
    return factors

"""nf4, fp4 and bitsandbytes' 8-bit codes in plain torch: bit-equal to its CPU functions, faster, and without it.

bitsandbytes finds a 4-bit code by a binary search for each weight. Here a few bits of the scaled weight choose a cell
that holds at most one border between codes, so that one comparison settles it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import code_tables
from ..utils.buffers import empty
from ..utils.device_constants import constant

TILE = 1 << 18  # weights encoded at a time: what stays in a core's cache
TILE_ELSEWHERE = 1 << 25
_SHIFT = 21  # of a float32's bits: sign, exponent and two bits of mantissa remain
_CELLS = 1 << (32 - _SHIFT)
_TINY = 1e-38  # bitsandbytes' least divisor


@dataclass(frozen=True)
class _Cells:
    """For every cell, [cells]: the code below the border (uint8), what a value above it adds where that is not always
    1 (float32, whole numbers, negative ones too), and the border (float32)."""

    code: Tensor
    step: Tensor | None
    border: Tensor


@constant
def _cells(kind: str, device: torch.device) -> _Cells:
    cpu = torch.device("cpu")
    values, order = torch.sort(code_tables.fourbit_code(kind, cpu), stable=True)
    borders = (values[:-1] + values[1:]) / 2
    # Negative floats grow downwards: a cell's least value has all its low bits set there.
    first = torch.arange(_CELLS, dtype=torch.int64, device="cpu") << _SHIFT
    last = first | ((1 << _SHIFT) - 1)
    negative = first >= 1 << 31
    low, high = (_as_floats(torch.where(negative, *pair)) for pair in ((last, first), (first, last)))
    below, above = (torch.bucketize(edge, borders) for edge in (low, high))
    if int((above - below).max()) > 1:
        raise AssertionError("two borders in one cell")
    finite = torch.isfinite(low) & torch.isfinite(high)
    below, above = (torch.where(finite, index, 0) for index in (below, above))
    codes = order.float()
    step = codes[above] - codes[below]
    one = bool((codes[1:] - codes[:-1] == 1).all())
    border = torch.where(above > below, borders[below.clamp(max=len(borders) - 1)], math.inf)
    return _Cells(codes[below].to(torch.uint8).to(device), None if one else step.to(device), border.to(device))


def _as_floats(bits: Tensor) -> Tensor:
    """Reinterpret unsigned 32-bit patterns in int64 as float32."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def encode_fourbit(weight: Tensor, kind: str, block: int) -> tuple[Tensor, Tensor]:
    """Quantize all weights, in memory order, to codes and scales.

    Returns:
        uint8 [ceil(n / 2), 1], the first of two codes in the high half; float32 [ceil(n / block)], the largest
        magnitude of each block.
    """
    flat = weight.reshape(-1)
    size, device = flat.numel(), flat.device
    codes = empty((math.ceil(size / 2), 1), torch.uint8, device)
    absmax = empty((math.ceil(size / block),), torch.float32, device)
    whole = size // block * block
    tile = min(whole, TILE if device.type == "cpu" else TILE_ELSEWHERE) // block * block
    values, spare = (torch.empty(tile, dtype=torch.float32, device=device) for _ in range(2))
    cell = torch.empty(tile, dtype=torch.int32, device=device)
    nibbles = torch.empty((2, tile), dtype=torch.uint8, device=device)
    for start in range(0, whole, tile or 1):
        count = min(tile, whole - start)
        some, scratch = values[:count].view(-1, block), spare[:count].view(-1, block)
        some.copy_(flat[start : start + count].view(-1, block))
        scale = absmax[start // block : (start + count) // block]
        torch.amax(torch.abs(some, out=scratch), dim=1, out=scale)
        some.mul_((1.0 / scale.clamp(min=_TINY))[:, None])
        _codes(some.view(-1), kind, cell[:count], scratch.view(-1), nibbles[:, :count])
        _pack(nibbles[0, :count], codes[start // 2 : (start + count) // 2, 0])
    if whole < size:
        # A last block that is not full; bitsandbytes divides here, and lets no scale be smaller than this.
        rest = flat[whole:].float()
        absmax[-1] = rest.abs().max().clamp(min=_TINY)
        rest = torch.nn.functional.pad((rest / absmax[-1]).clamp_(-1, 1), (0, len(rest) % 2))
        nibbles = torch.empty((2, len(rest)), dtype=torch.uint8, device=device)
        _codes(rest, kind, torch.empty_like(rest, dtype=torch.int32), torch.empty_like(rest), nibbles)
        _pack(nibbles[0], codes[whole // 2 :, 0])
    return codes, absmax


def _codes(values: Tensor, kind: str, cell: Tensor, spare: Tensor, out: Tensor) -> None:
    """Write the codes of `values` (float32 [n], overwritten) to row 0 of `out` (uint8 [2, n]); NaN gets any code."""
    table = _cells(kind, values.device)
    torch.bitwise_right_shift(values.view(torch.int32), _SHIFT, out=cell)
    cell.bitwise_and_(_CELLS - 1)
    torch.index_select(table.border, 0, cell, out=spare)
    torch.gt(values, spare, out=values)
    if table.step is not None:
        values.mul_(torch.index_select(table.step, 0, cell, out=spare))
    torch.index_select(table.code, 0, cell, out=out[0])
    out[1].view(torch.int8).copy_(values)
    out[0].add_(out[1])  # as bytes, which wrap: a step may be negative


def _pack(nibbles: Tensor, out: Tensor) -> None:
    """Pack pairs of codes (uint8 [2n], overwritten) into bytes (uint8 [n]), the first in the high half."""
    both = nibbles.view(torch.int16)  # the first code in the low byte, the second in the high one
    first = both << 4
    both.bitwise_right_shift_(8).bitwise_or_(first)
    out.copy_(both)  # the low byte


def decode_fourbit(codes: Tensor, absmax: Tensor, kind: str, block: int, out: Tensor) -> None:
    """Dequantize `encode_fourbit`'s codes (uint8 [ceil(n / 2)]) into `out`, contiguous [n] of any float dtype."""
    size, device = out.numel(), out.device
    whole = size // block * block
    tile = min(whole, TILE if device.type == "cpu" else TILE_ELSEWHERE) // block * block
    pairs, values = _pairs(kind, device), torch.empty(tile, dtype=torch.float32, device=device)
    index = torch.empty(tile // 2, dtype=torch.int32, device=device)
    for start in range(0, whole, tile or 1):
        count = min(tile, whole - start)
        index[: count // 2].copy_(codes[start // 2 : (start + count) // 2])
        torch.index_select(pairs, 0, index[: count // 2], out=values[:count].view(torch.int64))
        some = values[:count].view(-1, block).mul_(absmax[start // block : (start + count) // block, None])
        out[start : start + count].copy_(some.view(-1))
    if whole < size:
        pair = codes[whole // 2 :]
        rest = torch.stack((pair >> 4, pair & 15), 1).view(-1)[: size - whole].int()
        out[whole:].copy_(code_tables.fourbit_code(kind, device)[rest] * absmax[whole // block])


@constant
def _pairs(kind: str, device: torch.device) -> Tensor:
    """Return both values of each byte, two float32 viewed as one int64: [256]."""
    byte = torch.arange(256, device=device)
    both = torch.stack((byte >> 4, byte & 15), 1)
    return code_tables.fourbit_code(kind, device)[both].contiguous().view(torch.int64).view(-1)


def decode_bytes(codes: Tensor, absmax: Tensor, table: Tensor, block: int, out: Tensor) -> None:
    """Dequantize 8-bit codes (uint8 [n]) by `table` (float32 [256]), a scale per `block`, into `out` (contiguous)."""
    tile = (TILE if out.device.type == "cpu" else TILE_ELSEWHERE) // block * block
    for start in range(0, out.numel(), tile):
        values = table.index_select(0, codes[start : start + tile].int())
        whole = len(values) // block * block
        scale = absmax[start // block : start // block + math.ceil(len(values) / block)]
        values[:whole].view(-1, block).mul_(scale[: whole // block, None])
        if whole < len(values):
            values[whole:].mul_(scale[-1])
        out[start : start + tile].copy_(values)

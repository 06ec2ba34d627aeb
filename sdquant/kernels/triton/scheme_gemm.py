"""Linear layers of schemes that quantize activations themselves (`Activations`): codes of rows in one launch, and their
product with the codes of a weight, with all scales and the bias, in another.

Every step is rounded as torch rounds it, so the results are those of `Backend.linear`, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ...core import dtype_name
from . import int8_gemm
from .activations import float8_code, magnitude, nearest
from .decoding import float8, rounded
from .int8_gemm import BAND, BLOCK
from .launch import decode
from .launch_config import EXACT, INTERPRETED, Launch
from .products import tile_of
from .tiles import RUN, Tile, best

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ...core import Activations, PackedLayout

# Columns of tiles that a program quantizes at once.
_AT_ONCE, _MOST = 2048, 16384
# The square root of the smallest normal number, of bfloat16 and float32: scales below it count as 1.
_LEAST_SCALE = 2.0**-63


@triton.jit
def scale_of(size, known, BOUND: tl.constexpr, KNOWN: tl.constexpr, LEAST: tl.constexpr, IN: tl.constexpr,
             BITS: tl.constexpr):  # fmt: skip
    """Return the scales of tiles, rounded to IN, from the largest `magnitude` in each."""
    if KNOWN:
        s = tl.zeros_like(size).to(tl.float32) + rounded(tl.load(known).to(tl.float32), IN, BITS)
    else:
        largest = size.to(tl.float32, bitcast=True)
        s = rounded(tl.div_rn(largest, tl.full(largest.shape, BOUND, tl.float32)), IN, BITS)
        s = tl.where(s < LEAST, 1.0, s)
    return s


@triton.jit
def tile_code(v, s, LOW: tl.constexpr, HIGH: tl.constexpr, IN: tl.constexpr, BITS: tl.constexpr):
    """Return the code of v in units of s: rounded to IN, then to a whole number, and saturated. NaN is 0."""
    units = rounded(tl.div_rn(v, tl.broadcast_to(s, v.shape)), IN, BITS)
    units = tl.where(units == units, units, 0.0)
    return nearest(tl.minimum(tl.maximum(units, LOW), HIGH))


@triton.jit
def tiles_kernel(
    x, codes, scale, sums, known, columns, tiles, tile, BOUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    LEAST: tl.constexpr, KNOWN: tl.constexpr, OF_ROWS: tl.constexpr, SUMS: tl.constexpr, IN: tl.constexpr,
    BITS: tl.constexpr, WHOLE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize BLOCK_T tiles of a row of x [rows, columns] to `codes`; write their scales, float32, and sums, int32,
    [rows, tiles]. WHOLE: a tile is of up to BLOCK columns; longer ones are read twice. OF_ROWS: all tiles of a row have
    one scale, that of its largest number, which is in `known` [rows]."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, BLOCK)
    x_at = x + row * columns + t[:, None] * tile
    to = codes + row * columns + t[:, None] * tile
    there = (t < tiles)[:, None]
    most = tl.zeros([BLOCK_T, BLOCK], dtype=tl.int32)
    total = tl.zeros([BLOCK_T, BLOCK], dtype=tl.int32)
    if WHOLE:
        live = there & (lane < tile)[None, :]
        v = tl.load(x_at + lane[None, :], mask=live, other=0.0).to(tl.float32)
        size = tl.max(magnitude(v), 1)
        if OF_ROWS:
            size = tl.zeros_like(size) + magnitude(tl.load(known + row).to(tl.float32))
        s = scale_of(size, known, BOUND, KNOWN, LEAST, IN, BITS)
        total = tile_code(v, s[:, None], LOW, HIGH, IN, BITS)
        tl.store(to + lane[None, :], total.to(tl.int8), mask=live)
    else:
        for first in range(0, tile, BLOCK):
            live = there & (first + lane < tile)[None, :]
            v = tl.load(x_at + first + lane[None, :], mask=live, other=0.0).to(tl.float32)
            most = tl.maximum(most, magnitude(v))
        s = scale_of(tl.max(most, 1), known, BOUND, KNOWN, LEAST, IN, BITS)
        for first in range(0, tile, BLOCK):
            live = there & (first + lane < tile)[None, :]
            v = tl.load(x_at + first + lane[None, :], mask=live, other=0.0).to(tl.float32)
            code = tile_code(v, s[:, None], LOW, HIGH, IN, BITS)
            total += code
            tl.store(to + first + lane[None, :], code.to(tl.int8), mask=live)
    tl.store(scale + row * tiles + t, s, mask=t < tiles)
    if SUMS:
        tl.store(sums + row * tiles + t, tl.sum(total, 1), mask=t < tiles)


@triton.jit
def numbers_kernel(
    x, out, scale, tile, BOUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, LEAST: tl.constexpr,
    FLOAT8: tl.constexpr, DECODED: tl.constexpr, IN: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Round one tile of x to codes, as numbers of dtype IN in `out`: in units of its scale, or DECODED."""
    at = tl.program_id(0).to(tl.int64) * tile
    lane = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, tile, BLOCK):
        v = tl.load(x + at + first + lane, mask=first + lane < tile, other=0.0).to(tl.float32)
        most = tl.maximum(most, magnitude(v))
    s = scale_of(tl.max(most, 0), x, BOUND, False, LEAST, IN, BITS)
    for first in range(0, tile, BLOCK):
        live = first + lane < tile
        v = tl.load(x + at + first + lane, mask=live, other=0.0).to(tl.float32)
        if FLOAT8:
            units = rounded(tl.div_rn(v, tl.broadcast_to(s, v.shape)), IN, BITS)
            units = tl.where(units == units, tl.minimum(tl.maximum(units, LOW), HIGH), units)
            number = float8(float8_code(units), True)
        else:
            number = tile_code(v, s, LOW, HIGH, IN, BITS).to(tl.float32)
        if DECODED:
            number = rounded(number * s, IN, BITS)
        tl.store(out + at + first + lane, number.to(out.dtype.element_ty), mask=live)
    tl.store(scale + tl.program_id(0), s.to(scale.dtype.element_ty))


@triton.jit
def of_scales(total, m_scale, n_scale, IN: tl.constexpr, BITS: tl.constexpr):
    """Return total, int32, as float32, times the scale of its row and that of its column, each step rounded to IN."""
    y = rounded(rounded(total.to(tl.float32), IN, BITS) * m_scale[:, None], IN, BITS)
    return rounded(y * n_scale[None, :], IN, BITS)


@triton.jit
def tiled_product_kernel(
    x, weight, out, row_scale, scale, bias, sums, zero, m_rows, rows, columns, tiles, tile, each, BIASED: tl.constexpr,
    ZERO: tl.constexpr, TILED: tl.constexpr, WHOLE: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Multiply x [m_rows, columns] by the transposed weight [rows, columns], int8 codes, and scale; add the bias.

    TILED: the sums of each tile of columns, a multiple of BLOCK_K, are scaled, and added in float32. row_scale, sums:
    [m_rows, tiles]. scale, zero: [rows, tiles], or one for `each` rows. WHOLE: `columns` is a multiple of BLOCK_K.
    """
    i, j = tile_of(tl.program_id(0), tl.cdiv(m_rows, BLOCK_M), tl.cdiv(rows, BLOCK_N), BAND)
    m = i * BLOCK_M + tl.arange(0, BLOCK_M)
    n = j * BLOCK_N + tl.arange(0, BLOCK_N)
    m_there, n_there = m < m_rows, n < rows
    k = tl.arange(0, BLOCK_K)
    # Beyond the end the last row is read once more, as in `product_kernel`.
    m_row, n_row = tl.minimum(m, m_rows - 1).to(tl.int64), tl.minimum(n, rows - 1).to(tl.int64)
    x_at = x + m_row[:, None] * columns + k[None, :]
    w_at = weight + n_row[None, :] * columns + k[:, None]
    m_at, n_at = m_row * tiles, n_row // each * tiles
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
    y = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if TILED:
        steps = tile // BLOCK_K
        for step in range(tiles * steps):
            one = step // steps
            a, b = tl.load(x_at + step * BLOCK_K), tl.load(w_at + step * BLOCK_K)
            m_scale, n_scale = tl.load(row_scale + m_at + one), tl.load(scale + n_at + one).to(tl.float32)
            total = tl.dot(a, b, total, out_dtype=tl.int32)
            if step - one * steps == steps - 1:
                if ZERO:
                    less = tl.load(sums + m_at + one)[:, None] * tl.load(zero + n_at + one).to(tl.int32)[None, :]
                    total -= less
                y += of_scales(total, m_scale, n_scale, IN, BITS)
                total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
        y = rounded(y, IN, BITS)
    else:
        for first in range(0, columns, BLOCK_K):
            if WHOLE:
                a, b = tl.load(x_at + first), tl.load(w_at + first)
            else:
                live = k < columns - first
                a = tl.load(x_at + first, mask=live[None, :], other=0)
                b = tl.load(w_at + first, mask=live[:, None], other=0)
            total = tl.dot(a, b, total, out_dtype=tl.int32)
        if ZERO:
            total -= tl.load(sums + m_at)[:, None] * tl.load(zero + n_at).to(tl.int32)[None, :]
        y = of_scales(total, tl.load(row_scale + m_at), tl.load(scale + n_at).to(tl.float32), IN, BITS)
    y = rounded(y, OUT, BITS)
    if BIASED:
        y = rounded(y + tl.load(bias + n_row).to(tl.float32)[None, :], OUT, BITS)
    at = m[:, None].to(tl.int64) * rows + n[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=m_there[:, None] & n_there[None, :])


def sizes_of(how: Activations, device: torch.device) -> tuple[Tile, ...]:
    """Return the tiles of a device that products are computed in, the largest first."""
    sizes, _ = int8_gemm.device_tiles(device)
    return sizes.by_tile if how.tile else sizes.by_row


def linear(
    form: PackedLayout, parts: Mapping[str, Tensor], how: Activations, x: Tensor, bias: Tensor | None,
    size: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Multiply x [m, columns] by the transposed weight and add the bias: [m, rows], as `Backend.linear` does.

    Args:
        size: of what a program computes; None for the best one.
    """
    (m, columns), device = x.shape, x.device
    tiles = columns // (how.tile or columns)
    codes = torch.empty(m, columns, dtype=torch.int8, device=device)
    scale = torch.empty(m, tiles, dtype=torch.float32, device=device)
    sums = torch.empty(m, tiles, dtype=torch.int32, device=device) if isinstance(form.zero, str) else None
    weight = parts[form.codes]
    if form.packing != "int8":
        weight = torch.empty(form.rows, columns, dtype=torch.int8, device=device)
        decode(replace(form, scale="", factor=1.0), parts, weight)(device)
    out = torch.empty(m, form.rows, dtype=x.dtype, device=device)
    known = parts[how.scale] if how.scale else None
    activation_codes(x, how, known, codes, scale, sums)(device)
    tiled_product(codes, scale, sums, form, weight, parts, bias, out, size)(device)
    return out


def _computed_in(dtype: torch.dtype) -> str:
    """Return the dtype that activations of `dtype` are scaled in."""
    return dtype_name(torch.float32 if dtype == torch.float16 else dtype)


def activation_codes(
    x: Tensor, how: Activations, known: Tensor | None, codes: Tensor, scale: Tensor, sums: Tensor | None,
    largest: Tensor | None = None,
) -> Launch:  # fmt: skip
    """Return the launch that quantizes x [m, columns], contiguous, to `codes`, int8 of the same shape.

    Args:
        known: the static scale, of one number. scale, sums: float32 and int32 [m, tiles], which are written.
        largest: the largest magnitude in each row [m], whose tiles then have the same scale.
    """
    (m, columns), tiles = x.shape, scale.shape[1]
    tile = columns // tiles
    whole = tile <= _MOST
    assert whole or largest is None
    block = triton.next_power_of_2(tile) if whole else BLOCK
    together = min(max(_AT_ONCE // block, 1), triton.next_power_of_2(tiles))
    arguments = {
        "x": x,
        "codes": codes,
        "scale": scale,
        "sums": scale if sums is None else sums,
        "known": largest if largest is not None else scale if known is None else known,
        "columns": columns,
        "tiles": tiles,
        "tile": tile,
        "BOUND": how.bound,
        "LOW": float(how.low),
        "HIGH": float(how.high),
        "LEAST": _LEAST_SCALE,
        "KNOWN": known is not None,
        "OF_ROWS": largest is not None and known is None,
        "SUMS": sums is not None,
        "IN": _computed_in(x.dtype),
        "BITS": INTERPRETED,
        "WHOLE": whole,
        "BLOCK_T": together,
        "BLOCK": block,
    }
    warps = min(16, max(4, together * block // 512))
    return Launch(tiles_kernel, (m, math.ceil(tiles / together)), arguments, {"num_warps": warps, **EXACT})


def tiled_product(
    codes: Tensor,
    row_scale: Tensor,
    sums: Tensor | None,
    form: PackedLayout,
    weight: Tensor,
    parts: Mapping[str, Tensor],
    bias: Tensor | None,
    out: Tensor,
    size: Tile | None = None,
) -> Launch:
    """Return the launch of the product of `activation_codes` with a weight, into `out` [m, rows], contiguous.

    Args:
        weight: its codes, int8 [rows, columns]. parts: what `form` names; of them scales and zero points are read.
        size: of what a program computes; None for the best one.
    """
    (m, columns), rows, tiles = codes.shape, form.rows, row_scale.shape[1]
    tile, scale = columns // tiles, parts[form.scale]
    zero = parts[form.zero] if isinstance(form.zero, str) else None
    sizes, processors = int8_gemm.device_tiles(codes.device)
    of = best(sizes.by_row if tiles == 1 else sizes.by_tile, m, rows, processors) if size is None else size
    deep = of.deep if tiles == 1 or tile % of.deep == 0 else RUN
    arguments = {
        "x": codes,
        "weight": weight,
        "out": out,
        "row_scale": row_scale,
        "scale": scale,
        "bias": out if bias is None else bias,
        "sums": row_scale if sums is None else sums,
        "zero": weight if zero is None else zero,
        "m_rows": m,
        "rows": rows,
        "columns": columns,
        "tiles": tiles,
        "tile": tile,
        "each": rows * tiles // scale.numel(),
        "BIASED": bias is not None,
        "ZERO": zero is not None,
        "TILED": tiles > 1,
        "WHOLE": columns % deep == 0,
        "IN": _computed_in(out.dtype),
        "OUT": dtype_name(out.dtype),
        "BITS": INTERPRETED,
        "BLOCK_M": of.rows,
        "BLOCK_N": of.columns,
        "BLOCK_K": deep,
        "BAND": BAND,
    }
    grid = (math.ceil(m / of.rows) * math.ceil(rows / of.columns),)
    return Launch(tiled_product_kernel, grid, arguments, {"num_warps": of.warps, "num_stages": of.stages, **EXACT})


def round_tiles(
    x: Tensor, tile: int, limits: tuple[float, float, float], float8_codes: bool, decoded: bool
) -> tuple[Tensor, Tensor]:
    """Round tiles of x, contiguous, to codes: numbers of its shape, in units of scales or `decoded`, and the scales,
    one for a tile. Both are in the dtype that activations are scaled in.

    Args:
        limits: the number that the largest magnitude of a tile becomes, the smallest code and the largest one.
    """
    of = torch.float32 if x.dtype == torch.float16 else x.dtype
    out, count = torch.empty(x.shape, dtype=of, device=x.device), x.numel() // tile
    scale = torch.empty(count, dtype=of, device=x.device)
    rounding(x, tile, limits, float8_codes, decoded, out, scale)(x.device)
    return out, scale


def rounding(
    x: Tensor, tile: int, limits: tuple[float, float, float], float8_codes: bool, decoded: bool, out: Tensor,
    scale: Tensor,
) -> Launch:  # fmt: skip
    """Return the launch of `round_tiles`."""
    bound, low, high = map(float, limits)
    block = min(triton.next_power_of_2(tile), BLOCK)
    arguments = {
        "x": x,
        "out": out,
        "scale": scale,
        "tile": tile,
        "BOUND": bound,
        "LOW": low,
        "HIGH": high,
        "LEAST": _LEAST_SCALE,
        "FLOAT8": float8_codes,
        "DECODED": decoded,
        "IN": _computed_in(x.dtype),
        "BITS": INTERPRETED,
        "BLOCK": block,
    }
    warps = min(8, max(1, block // 512))
    return Launch(numbers_kernel, (x.numel() // tile,), arguments, {"num_warps": warps, **EXACT})

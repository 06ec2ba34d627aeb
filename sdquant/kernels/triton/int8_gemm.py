"""Products of 8-bit codes on GPUs: activations are quantized in one launch, and another multiplies, scales and adds.

    codes, scale, sums = quantize_rows(x)
    product(codes, scale, weight, bias, out, sums)(device)      with one scale for a row of the weight
    product_by_run(codes, ...)(device)                          with several

A weight that is not such codes is `quantize_weight`'s before. Where cuBLAS multiplies, `finishing` scales what
`torch._int_mm` gives, which writes and reads 8 bytes more for a result.

The numbers are those of `int8_linear`, bit for bit: codes are round(value * (127 / largest)), ties to even, in
float32. Reached by `imports.eight`, so that nothing imports triton by accident.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from ...core import dtype_name
from ...utils.tensors import divided
from ..row_codes import RowCodes
from .activations import again_kernel, quantize_kernel
from .launch import multiplies
from .launch_config import EXACT, INTERPRETED, Launch, plan_of, pointers
from .products import finish_kernel, product_kernel, runs_kernel
from .rotation import butterflies, rotate_columns, steps_of
from .tiles import RUN, SPREAD, Tile, Tiles, best, tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ...core import PackedLayout

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
AT_ONCE = 16384  # columns of a row that a program keeps in registers while it looks for the largest
_AMD = torch.version.hip is not None
# Codes over two bytes: compiled for AMD's cards each is a branch, and a row of them too much code for the cache.
_ODD = ("threes", "fives", "sevens")
_HELD = 64  # weights of a row that a thread keeps while it looks for the largest
BAND = 8  # rows of tiles that are computed side by side
BLOCK = 4096  # columns of longer rows, which are read twice


def quantize_rows(
    x: Tensor, dtype: torch.dtype = torch.int8, sums: bool = True, rotation: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize the rows of x [m, k] of any float dtype.

    Args:
        rotation: how many columns are rotated together before that, in float32; 0 for none.

    Returns:
        codes [m, k] of `dtype` (int8 or float8_e4m3fn); scales, float32 [m, 1]; if asked, the sum of each row's codes,
        int32 [m, 1], only for int8. A row that is not finite gets a scale that is not.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    found = torch.empty((x.shape[0], 1), dtype=torch.int32, device=x.device) if sums and dtype == torch.int8 else None
    if x.numel():
        quantization(x, codes, scale, found, rotation)(x.device)
    return codes, scale, found


def quantization(x: Tensor, codes: Tensor, scale: Tensor, sums: Tensor | None, rotation: int = 0) -> Launch:
    """Return the launch of `quantize_rows`, for rows whose columns are side by side."""
    columns = x.shape[1]
    whole = columns <= AT_ONCE
    block = triton.next_power_of_2(columns) if whole else BLOCK
    arguments = {
        "x": x,
        "codes": codes if codes.dtype == torch.int8 else codes.view(torch.uint8),
        "scale": scale,
        "sums": scale if sums is None else sums,
        "columns": columns,
        "x_columns": x.stride(0),
        "LARGEST": LARGEST[codes.dtype],
        "FLOAT8": codes.dtype != torch.int8,
        "SUMS": sums is not None,
        **steps_of(rotation),
        "WHOLE": whole,
        "BLOCK": block,
    }
    return Launch(quantize_kernel, (x.shape[0],), arguments, {"num_warps": min(16, max(4, block // 512)), **EXACT})


def quantize_weight(form: PackedLayout, parts: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Requantize a packed weight that `quantizes` accepts, as its float32 values, to codes [rows, columns] of `dtype`
    (int8 or float8_e4m3fn) and scales, float32 [rows]."""
    device = parts[form.codes].device
    codes = torch.empty((form.rows, form.columns), dtype=dtype, device=device)
    scale = torch.empty(form.rows, dtype=torch.float32, device=device)
    requantization(form, parts, codes, scale)(device)
    return codes, scale


def quantizes(form: PackedLayout) -> bool:
    """Return whether there is a kernel that requantizes such weights."""
    return multiplies(form)


def requantization(
    form: PackedLayout, parts: Mapping[str, Tensor], codes: Tensor, scale: Tensor, amd: bool = _AMD
) -> Launch:
    """Return the launch of `quantize_weight`."""
    plan = plan_of(form, parts)
    per_row = form.columns // plan.block.weights
    branches = amd and form.packing in _ODD
    whole = form.columns <= AT_ONCE and not branches
    # A power of two of chunks, and another: of usual rows nothing is left over.
    first = 1 << (per_row.bit_length() - 1) if whole else (512 if branches else 4096) // plan.block.weights
    rest = triton.next_power_of_2(per_row - first) if whole and per_row > first else 0
    warps = 4 if branches else min(8, triton.next_power_of_2(math.ceil(first * plan.block.weights / _HELD / 32)))
    arguments = {
        "out": codes if codes.dtype == torch.int8 else codes.view(torch.uint8),
        "out_scale": scale,
        "per_row": per_row,
        "columns": form.columns,
        **pointers(form, parts, plan.block),
        **plan.numbers,
        **plan.compiled,
        "LARGEST": LARGEST[codes.dtype],
        "FLOAT8": codes.dtype != torch.int8,
        "WHOLE": whole,
        "BLOCK_C": first,
        "REST": rest,
    }
    return Launch(again_kernel, (form.rows,), arguments, {"num_warps": warps, **EXACT})


def finishing(
    product: Tensor, row_scale: Tensor, weight: RowCodes, bias: Tensor | None, out: Tensor, sums: Tensor | None
) -> Launch:
    """Return the launch that writes (product + sums * (shift - zero)) * row_scale * scale + bias to `out`.

    Args:
        product: int32 [m, rows], contiguous, of the codes as int8.
        row_scale, sums: float32 and int32 [m, 1], of the activations; sums may be None if the weight is not `shifted`.
        out: [m, rows]; may be some columns of a wider tensor.
    """
    rows, columns = product.shape
    tall, wide = (1, 1024) if rows == 1 else (8, 256)
    arguments = {
        "product": product,
        "rows": rows,
        "columns": columns,
        **_scaling(row_scale, weight, bias, out, sums),
        "BLOCK_M": tall,
        "BLOCK_N": wide,
    }
    grid = (math.ceil(rows / tall), math.ceil(columns / wide))
    return Launch(finish_kernel, grid, arguments, {"num_warps": 4, **EXACT})


def product(
    codes: Tensor,
    row_scale: Tensor,
    weight: RowCodes,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor | None,
    tile: Tile | None = None,
) -> Launch:
    """Return the launch of a whole product with one scale per row, from codes int8 [m, columns] to results.

    Args:
        row_scale, sums, out: as in `finishing`. tile: None for the best one of this device.
    """
    (m, columns), rows = codes.shape, out.shape[1]
    sizes, processors = device_tiles(codes.device)
    of = best(sizes.by_row, m, rows, processors) if tile is None else tile
    arguments = {
        "x": codes,
        "weight": weight.codes,
        "m_rows": m,
        "rows": rows,
        "columns": columns,
        **_scaling(row_scale, weight, bias, out, sums),
        "UNSIGNED": weight.codes.dtype == torch.uint8,
        "WHOLE": columns % of.deep == 0,
        "BLOCK_M": of.rows,
        "BLOCK_N": of.columns,
        "BLOCK_K": of.deep,
        "BAND": BAND,
    }
    grid = (math.ceil(m / of.rows) * math.ceil(rows / of.columns),)
    return Launch(product_kernel, grid, arguments, {"num_warps": of.warps, "num_stages": of.stages, **EXACT})


def _scaling(
    row_scale: Tensor, weight: RowCodes, bias: Tensor | None, out: Tensor, sums: Tensor | None
) -> dict[str, object]:
    """Return the arguments of `products.scaled`, and those for storing the results."""
    each = isinstance(weight.zero, Tensor)
    groups = 1
    if weight.scale is not None:
        groups = weight.scale.numel()
    elif isinstance(weight.zero, Tensor):
        groups = weight.zero.numel()
    return {
        "out": out,
        "row_scale": row_scale,
        "scale": row_scale if weight.scale is None else weight.scale,
        "bias": out if bias is None else bias,
        "sums": row_scale if sums is None else sums,
        "zero": weight.zero if each else weight.codes,
        "out_columns": out.stride(0),
        "each": out.shape[1] // groups,
        "factor": weight.factor,
        "number": weight.shift if isinstance(weight.zero, Tensor) else weight.shift - weight.zero,
        "BIASED": bias is not None,
        "ADDED": "each" if each else "number" if weight.shifted else "",
        "SCALED": weight.scale is not None,
        "OUT": dtype_name(out.dtype),
        "BITS": INTERPRETED,
    }


@cache
def device_tiles(device: torch.device) -> tuple[Tiles, int]:
    """Return the tiles for a device, and the number of its processors."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return tiles((9, 0)), 132  # in the interpreter: an H100's
    amd = torch.version.hip is not None
    return tiles(torch.cuda.get_device_capability(device), amd), _processors(device)


def _processors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def product_by_run(
    codes: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor, bias: Tensor | None, out: Tensor,
    tile: Tile | None = None, factor: float = 1.0,
) -> Launch:  # fmt: skip
    """Return the launch of a product with several scales per row, from codes to results.

    Args:
        codes, weight: int8 [m, columns] and [rows, columns], contiguous. row_scale: float32 [m, 1], of the codes, or
            [m, groups], of their runs, where taps are 1.
        scale: [rows, groups, taps], contiguous, of columns [groups, columns / groups / taps, taps], in any float dtype.
        out: [m, rows]; may be some columns of a wider tensor. tile: None for the best one. factor: of all scales.
    """
    (m, columns), (rows, groups, taps) = codes.shape, scale.shape
    each = columns // groups // taps
    sizes, processors = device_tiles(codes.device)
    of = best(SPREAD if taps > 1 else sizes.by_run, m, rows, processors) if tile is None else tile
    arguments = {
        "x": codes,
        "weight": weight,
        "scale": scale,
        "row_scale": row_scale,
        "bias": out if bias is None else bias,
        "out": out,
        "m_rows": m,
        "rows": rows,
        "columns": columns,
        "out_columns": out.stride(0),
        "groups": groups,
        "each": each,
        "taps": taps,
        "factor": factor,
        "BIASED": bias is not None,
        "OUT": dtype_name(out.dtype),
        "BITS": INTERPRETED,
        "BLOCK_M": of.rows,
        "BLOCK_N": of.columns,
        "BLOCK_K": of.deep if each % of.deep == 0 else RUN,
        "BAND": BAND,
        "SPREAD": taps > 1,
        "BOTH": row_scale.shape[1] > 1,
    }
    grid = (math.ceil(m / of.rows) * math.ceil(rows / of.columns),)
    return Launch(runs_kernel, grid, arguments, {"num_warps": of.warps, "num_stages": of.stages, **EXACT})


def sound(device: torch.device) -> bool:
    """Return whether codes and scaling are torch's numbers on this device; checked once, before they are used."""
    x = torch.linspace(-3, 3, 5 * 96, dtype=torch.float32, device=device).view(5, 96).to(torch.bfloat16)
    x[1] = 0
    codes, scale, sums = quantize_rows(x)
    assert sums is not None
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    target = wide.mul(largest.new_full((), 127.0).div(largest).masked_fill_(largest == 0, 0.0)).round_().to(torch.int8)
    return bool(
        torch.equal(codes, target)
        and torch.equal(scale, divided(largest, 127.0))
        and torch.equal(sums, codes.sum(1, keepdim=True, dtype=torch.int32))
        and all(_finishes(case) for case in _cases(device, _SMALL))
    )


def sound_products(device: torch.device) -> bool:
    """Return whether products are torch's numbers on this device, in tiles of every size, without rests and with them;
    checked once, before they are used."""
    sizes, _ = device_tiles(device)
    return (
        all(_multiplies_by_row(case, tile) for tile in sizes.by_row[:-1] for case in _cases(device, _LARGE))
        and all(_multiplies_by_row(case, sizes.by_row[-1]) for case in _cases(device, _SMALL))
        and all(_multiplies_by_run(device, tile, both=both) for tile in sizes.by_run for both in (False, True))
        and all(_multiplies_by_run(device, tile, taps=2) for tile in SPREAD)
    )


def sound_rotation(device: torch.device, group: int) -> bool:
    """Return whether rotations are torch's numbers on this device, alone and before rows are quantized; checked once,
    before they are used."""
    x = torch.linspace(-9, 9, 9 * group, dtype=torch.float32, device=device).view(3, 3 * group).sin()
    x[1] *= 1e-3
    expected, half = butterflies(x, group), x.to(torch.bfloat16)
    at_once, in_turn = quantize_rows(x, rotation=group), quantize_rows(expected)
    return (
        torch.equal(rotate_columns(x, group), expected)
        and torch.equal(rotate_columns(half, group), butterflies(half, group).to(half.dtype))
        and all(torch.equal(one, other) for one, other in zip(at_once, in_turn, strict=True))  # type: ignore[arg-type]
    )


# Rows of both sides, and columns: sums of 8-bit products below 2 ** 24 are exact in float32, in whatever order.
_LARGE, _SMALL = (130, 300, 512), (5, 80, 176)


@dataclass(frozen=True)
class _Case:
    """Codes, what scales their product, and what comes of it."""

    left: Tensor
    row_scale: Tensor
    sums: Tensor
    total: Tensor
    weight: RowCodes
    bias: Tensor
    wanted: Tensor

    def gives(self, launch: Callable[[Tensor], Launch]) -> bool:
        """Return whether a launch writes the right results to the tensor that it is made for."""
        out = torch.full_like(self.wanted, torch.nan)
        launch(out)(out.device)
        return torch.equal(out, self.wanted)


def _cases(device: torch.device, sizes: tuple[int, int, int]) -> Iterator[_Case]:
    m, rows, columns = sizes
    left, right = _codes(m, columns, 7, device), _codes(rows, columns, 3, device)
    row_scale, sums = _scales(m, device).view(m, 1), left.sum(1, keepdim=True, dtype=torch.int32)
    scale, zero = _scales(rows, device), torch.arange(rows, device=device).to(torch.uint8)
    bias = torch.linspace(-1, 1, rows, dtype=torch.float32, device=device).to(torch.bfloat16)
    total = (left.float() @ right.float().t()).to(torch.int32)
    for weight in (RowCodes(right, scale, 0.5), RowCodes(right.view(torch.uint8) ^ 0x80, scale, 0.5, zero)):
        wide = (total + sums * weight.added()).float().mul_(row_scale).mul_(weight.scales()).add_(bias)
        yield _Case(left, row_scale, sums, total, weight, bias, wide.to(torch.bfloat16))


def _codes(rows: int, columns: int, step: int, device: torch.device) -> Tensor:
    return torch.arange(rows * columns, device=device).view(rows, columns).mul(step).to(torch.int8)


def _scales(count: int, device: torch.device) -> Tensor:
    return torch.linspace(0.01, 0.02, count, dtype=torch.float32, device=device)


def _finishes(case: _Case) -> bool:
    return case.gives(lambda out: finishing(case.total, case.row_scale, case.weight, case.bias, out, case.sums))


def _multiplies_by_row(case: _Case, tile: Tile) -> bool:
    return case.gives(lambda out: product(case.left, case.row_scale, case.weight, case.bias, out, case.sums, tile))


def _multiplies_by_run(device: torch.device, tile: Tile, taps: int = 1, both: bool = False) -> bool:
    """Multiply codes in two runs, scaled on one side or `both`: side by side, or by turns, as taps of convolutions."""
    m, rows, columns = 70, 140, 2 * 2 * RUN
    left, right = _codes(m, columns, 7, device), _codes(rows, columns, 1, device)
    scale = _scales(2 * rows, device).view(rows, 2 // taps, taps).to(torch.float32 if both else torch.bfloat16)
    row_scale = _scales((1 + both) * m, device).view(m, -1)
    one = row_scale.new_ones(m, 2)
    of_runs, of_rows = (row_scale, one[:, :1]) if both else (one, row_scale)
    out = torch.empty(m, rows, dtype=torch.bfloat16, device=device)
    product_by_run(left, right, scale, row_scale, None, out, tile)(device)
    runs = [slice(i, None, 2) if taps == 2 else slice(i * columns // 2, (i + 1) * columns // 2) for i in (0, 1)]
    first, second = (
        left[:, run].float() @ right[:, run].float().t() * of_runs[:, i, None] * scale.view(rows, 2)[:, i]
        for i, run in enumerate(runs)
    )
    return torch.equal(out, ((first + second) * of_rows).to(torch.bfloat16))

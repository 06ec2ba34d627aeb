"""Every kernel in the configurations that its launchers choose, as launches of layers' sizes. A new kernel is a row.

Tensors are stand-ins of one number: the compiler sees their dtypes, and sizes as far as they are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, product
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sdquant.core.low_rank import LowRank
from sdquant.core.packed_layout import Activations, PackedLayout
from sdquant.kernels.triton import branch as low_rank
from sdquant.kernels.triton import (
    branch_sides,
    expansion,
    gathering,
    int8_gemm,
    launch,
    rotation,
    scheme_gemm,
    scheme_scaling,
    tiles,
)
from sdquant.kernels.triton.blocks import block_of

from .triton_cases import DTYPES, ROW_CODES, Case, cases, row_codes

if TYPE_CHECKING:
    from sdquant.kernels.row_codes import RowCodes
    from sdquant.kernels.triton.launch_config import Launch

    from .offline import Target

WIDE, SQUARE = (12288, 3072), (3072, 3072)  # rows by tiles of 64, and of 32
TALL = (16, 32, 64)


@dataclass(frozen=True)
class Configuration:
    """A launch to compile, and how many numbers each of its programs handles: in a turn of its loop, if it has one."""

    kernel: str
    name: str
    launch: Launch
    numbers: int

    @property
    def title(self) -> str:
        return f"{self.kernel} of {self.name}"

    def each(self, target: Target) -> float:
        """Numbers for a thread."""
        return self.numbers / (self.launch.options["num_warps"] * target.lanes)


def wide(form: PackedLayout, rows: int, columns: int) -> PackedLayout:
    """A form with other sizes, whose groups are to a row what they were."""
    group = form.group
    if group >= form.rows * form.columns:
        group = rows * columns
    elif group % form.columns == 0:
        group = group // form.columns * columns
    return replace(form, rows=rows, columns=columns, group=group)


def weights() -> Iterator[tuple[Case, PackedLayout, PackedLayout]]:
    """Each kind of weight, with the forms of layers of both sizes if there are products for those, else its own."""
    seen: set[PackedLayout] = set()
    for case in cases():
        both = [wide(case.form, *size) for size in (WIDE, SQUARE)]
        if not launch.multiplies(case.form):
            both = [case.form, case.form]
        if both[0] not in seen:
            seen.add(both[0])
            yield case, both[0], both[1]


def stand(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of a shape that has memory for one number."""
    return torch.empty(1, dtype=dtype).expand(shape)


def _chunks(of: Launch) -> int:
    return prod(int(of.arguments.get(name, 1)) for name in ("BLOCK_N", "BLOCK_C", "LANES"))


def decoding(target: Target) -> Iterator[Configuration]:
    for case, form, _ in weights():
        for dtype in DTYPES:
            of = launch.decode(form, case.parts, torch.empty(1, dtype=dtype))
            yield Configuration("decode", f"{case.name} as {dtype}", of, _chunks(of) * of.arguments["PLANES"])


def _product(case: Case, form: PackedLayout, m: int, dtype: torch.dtype, biased: bool) -> Configuration:
    x, out = stand(dtype, m, form.columns), torch.empty(1, dtype=dtype)
    of = launch.product(form, case.parts, x, out if biased else None, out)
    kernel = "one row" if m == 1 else f"{m} rows by {of.arguments['BLOCK_N']}"
    name = f"{case.name} as {dtype}{'' if biased else ' without bias'}"
    return Configuration(kernel, name, of, _chunks(of) * of.arguments["PLANES"])


def products(target: Target) -> Iterator[Configuration]:
    """By turns with a bias and without: what it adds comes after the loop. The same of dtypes."""
    halves, all_dtypes, biased = cycle((torch.bfloat16, torch.float16)), cycle(DTYPES), cycle((True, False))
    for case, form, square in weights():
        if not launch.multiplies(form):
            continue
        yield _product(case, form, 1, torch.bfloat16, True)
        yield _product(case, form, 1, next(all_dtypes), False)
        for one, m in product((form, square), TALL):
            yield _product(case, one, m, next(halves), next(biased))
        next(halves)  # another one for each size and kind of weight than before
        if next(biased):
            next(halves)


def requantizations(target: Target) -> Iterator[Configuration]:
    codes, scale = torch.empty(1, dtype=torch.int8), torch.empty(1)
    for case, form, _ in weights():
        if int8_gemm.quantizes(form):
            of = int8_gemm.requantization(form, case.parts, codes, scale, target.is_amd)
            held = form.columns if of.arguments["WHOLE"] else _chunks(of) * of.arguments["PLANES"]
            yield Configuration("again", case.name, of, held)
            of = int8_gemm.requantization(form, case.parts, stand(torch.float8_e4m3fn, 1), scale, target.is_amd)
            yield Configuration("again as float8", case.name, of, held)


def quantizations(target: Target) -> Iterator[Configuration]:
    scale, sums = torch.empty(4, 1), cycle((torch.empty(4, 1, dtype=torch.int32), None))
    for columns, dtype in product((64, 320, 1152, 3072, 12288, 20480), DTYPES):
        for codes in (torch.int8, torch.float8_e4m3fn):
            asked = next(sums) if codes == torch.int8 else None
            of = int8_gemm.quantization(stand(dtype, 4, columns), stand(codes, 4, columns), scale, asked)
            name = f"{columns} columns of {dtype} to {codes}{'' if asked is None else ' with sums'}"
            yield Configuration("quantize", name, of, of.arguments["BLOCK"])


def rotations(target: Target) -> Iterator[Configuration]:
    dtypes = cycle(DTYPES)
    for group in (4, 8, 16, 64, 128, 256, 1024, 4096):
        x = stand(next(dtypes), 4, 12288)
        of = rotation.rotation(x, group, stand(x.dtype, 4, 12288))
        yield Configuration("rotate", f"{group} columns of {x.dtype}", of, of.arguments["BLOCK"])
        codes, scale = stand(torch.int8, 4, 12288), torch.empty(4, 1)
        of = int8_gemm.quantization(x, codes, scale, None, group)
        yield Configuration("rotate", f"{group} columns of {x.dtype} to int8", of, of.arguments["BLOCK"])


def branches(target: Target) -> Iterator[Configuration]:
    dtypes, sides = cycle(DTYPES), cycle((torch.bfloat16, torch.float16))
    for case, form, _ in weights():
        of, dtype, rank = next(sides), next(dtypes), 32
        stored = {
            "up": stand(of, form.rows, rank), "down": stand(of, form.columns, rank), "smooth": stand(of, form.columns)
        }  # fmt: skip
        branch = LowRank(residual=(), down="down", up="up", smooth="smooth")
        block = block_of(form)
        if block is None or block.family != "form" or not launch.multiplies(form):
            continue
        for columns, kernel in ((form.columns, "branch"), (form.columns + rank, "side")):
            out = stand(dtype, form.rows, columns)
            made = low_rank.decoding_with_branch(form, case.parts, branch, stored, out)
            name = f"{case.name} as {dtype}, with sides of {of}"
            yield Configuration(kernel, name, made, _chunks(made) * made.arguments["PLANES"])


def of_sides(target: Target) -> Iterator[Configuration]:
    """In float32, and of sides in another dtype than float16, without tensor cores."""
    inputs = cycle((None, torch.int8, torch.float8_e4m3fn, torch.int8))
    both = ((dtype, of) for dtype in DTYPES for of in (torch.bfloat16, torch.float16))
    for (dtype, of), (rank, turned, group) in product(both, ((32, False, 0), (128, True, 0), (32, True, 256))):
        m, rows, columns = 4608, 3072, 3072
        by_matrices = dtype == torch.bfloat16 or dtype == of
        stored = {"up": stand(of, rows, rank), "smooth": stand(of, columns), "rows": stand(of, rows)}
        stored["down"] = stand(of, rank, columns) if turned else stand(of, columns, rank)
        more = "" if group else "smooth"
        branch = LowRank(residual=(), down="down", up="up", smooth=more, rows="rows" * turned, is_turned=turned)
        between = stand(branch_sides.dtype_between(dtype), m, branch_sides.width_of(rank))
        name = f"rank {rank} of {of}, turned: {turned}, rotated by {group}, as {dtype}"
        for codes in (next(inputs), next(inputs)) if dtype != torch.float32 else (next(inputs),):
            to = branch_sides.Inputs(stand(codes or dtype, m, columns))
            if codes is not None:
                to = branch_sides.Inputs(stand(codes, m, columns), torch.empty(1), None)
            made = branch_sides.down(stand(dtype, m, columns), branch, stored, to, between, group)
            kernel = "by down" if by_matrices else "down"
            numbers = made.arguments["BLOCK_M"] * made.arguments["BLOCK_K"]
            yield Configuration(f"{kernel} {rank}{' rotated' * bool(group)}", f"{name}, {codes}", made, numbers)
        y = stand(dtype, m, rows)
        made = branch_sides.up(y, branch, stored, between, y, stand(dtype, rows) if turned else None)
        numbers = made.arguments["BLOCK_M"] * made.arguments["BLOCK_N"]
        yield Configuration(f"{'by ' * (dtype == torch.bfloat16)}up {rank}", name, made, numbers)


def expansions(target: Target) -> Iterator[Configuration]:
    out, table = stand(torch.int8, 3072, 3072), torch.empty(16)
    for bits, dtype in product((4, 6), (torch.float32, torch.float8_e4m3fn)):
        codes, scale = stand(torch.uint8, 3072, 3072 * bits // 8), stand(dtype, 3072, 192)
        for to in (None, torch.bfloat16):
            values, channel = (out, None) if to is None else (stand(to, 3072, 3072), stand(torch.float32, 3072, 1))
            of = expansion.expansion(codes, bits, scale, table if bits == 4 else None, values, channel)
            yield Configuration("expand", f"{bits} bits, {dtype}, to {to}", of, of.arguments["BLOCK"])


_SUMS = torch.empty(1, 1, dtype=torch.int32)


def _of_rows(kind: str, columns: int) -> RowCodes:
    """The codes of a layer's weight; of its scales there are fewer."""
    small = row_codes(kind, 15, 1, np.random.default_rng(0))
    return replace(small, codes=stand(small.codes.dtype, 3072, columns))


def finishing(target: Target) -> Iterator[Configuration]:
    biased = cycle((True, False))
    for rows, kind, dtype in product((1, 4608), ROW_CODES, DTYPES):
        out, row_scale = torch.empty_strided((rows, 3072), (3072, 1), dtype=dtype), stand(torch.float32, rows, 1)
        bias = stand(dtype, 3072) if next(biased) else None
        of = int8_gemm.finishing(stand(torch.int32, rows, 3072), row_scale, _of_rows(kind, 1), bias, out, _SUMS)
        name = f"{rows} rows, {kind}, as {dtype}{'' if bias is not None else ' without bias'}"
        yield Configuration("finish", name, of, of.arguments["BLOCK_M"] * of.arguments["BLOCK_N"])
        next(biased)


def by_row(target: Target) -> Iterator[Configuration]:
    biased, dtypes = cycle((True, False, False)), cycle(DTYPES)
    for tile, kind, columns in product(tiles.tiles(target.capability, target.is_amd).by_row, ROW_CODES, (3072, 3024)):
        dtype, m = next(dtypes), 4608
        out, row_scale = stand(dtype, m, 3072), stand(torch.float32, m, 1)
        bias = stand(dtype, 3072) if next(biased) else None
        codes = stand(torch.int8, m, columns)
        of = int8_gemm.product(codes, row_scale, _of_rows(kind, columns), bias, out, _SUMS, tile)
        name = f"{tile.rows}x{tile.columns}x{tile.deep}, {kind}, {columns} columns, as {dtype}"
        yield Configuration("by row", name, of, tile.columns * tile.deep)


def by_run(target: Target) -> Iterator[Configuration]:
    sizes = tiles.tiles(target.capability, target.is_amd)
    kinds = ((256, False), (64, False), (256, True))
    for (number, tile), dtype, (each, both) in product(enumerate((*sizes.by_run, *tiles.SPREAD)), DTYPES, kinds):
        taps = 9 if number >= len(sizes.by_run) else 1
        if both and taps > 1:
            continue
        columns = 10 * each * taps
        codes, weight = stand(torch.int8, 4608, columns), stand(torch.int8, 3072, columns)
        out, bias = stand(dtype, 4608, 3072), stand(dtype, 3072) if each == 64 else None
        of_scale = torch.float32 if both else dtype  # those of a file, if the weight is not quantized again
        scale, row_scale = stand(of_scale, 3072, 10, taps), stand(torch.float32, 4608, 10 if both else 1)
        of = int8_gemm.product_by_run(codes, weight, scale, row_scale, bias, out, tile)
        name = f"{tile.rows}x{tile.columns}, runs of {each}{' of both' * both}, {taps} taps, as {dtype}"
        yield Configuration("by run", name, of, of.arguments["BLOCK_N"] * of.arguments["BLOCK_K"])


_EIGHT = Activations(bound=127.5, low=-128, high=127)


def tile_codes(target: Target) -> Iterator[Configuration]:
    known, sums = cycle((None, torch.empty(1))), cycle((True, False, False))
    for columns, tile, dtype in product((320, 3072, 12288, 20480), (0, 128), DTYPES):
        tiles_of = columns // (tile or columns)
        if columns % (tile or columns):
            continue
        scale, of_rows = stand(torch.float32, 4, tiles_of), stand(torch.int32, 4, tiles_of) if next(sums) else None
        x, static = stand(dtype, 4, columns), next(known)
        of = scheme_gemm.activation_codes(x, _EIGHT, static, stand(torch.int8, 4, columns), scale, of_rows)
        name = f"{columns} columns of {dtype} in tiles of {tile or columns}{'' if static is None else ', static'}"
        yield Configuration("tiles", name, of, of.arguments["BLOCK_T"] * of.arguments["BLOCK"])


def numbers(target: Target) -> Iterator[Configuration]:
    decoded = cycle((True, False))
    for tile, dtype, float8 in product((16, 320, 3072, 12288), DTYPES, (False, True)):
        x, of = stand(dtype, 4, 12480), torch.float32 if dtype == torch.float16 else dtype
        limits = (448.0, -448.0, 448.0) if float8 else (127.5, -128.0, 127.0)
        made = scheme_gemm.rounding(x, tile, limits, float8, next(decoded), stand(of, 4, 12480), stand(of, 4))
        name = f"{tile} columns of {dtype}, {'float8' if float8 else 'int8'}{' decoded' if next(decoded) else ''}"
        yield Configuration("numbers", name, made, made.arguments["BLOCK"])


def by_tile(target: Target) -> Iterator[Configuration]:
    sizes, biased, zeros = (
        tiles.tiles(target.capability, target.is_amd),
        cycle((True, False, False)),
        cycle((False, True)),
    )
    for columns, size, dtype in product((3072, 3024), (0, 128, 192), DTYPES):
        if columns % (size or columns):
            continue
        count, zero = columns // (size or columns), next(zeros)
        for of_size in sizes.by_tile if size else sizes.by_row:
            form = PackedLayout(
                rows=3072, columns=columns, codes="codes", packing="int8", group=size or columns, scale="scale",
                zero="zero" if zero else 0, zero_packing="int8", arithmetic="float32",
            )  # fmt: skip
            parts = {"scale": stand(dtype, 3072, count), "zero": stand(torch.int8, 3072, count)}
            codes, row_scale = stand(torch.int8, 4608, columns), stand(torch.float32, 4608, count)
            of = scheme_gemm.tiled_product(
                codes, row_scale, stand(torch.int32, 4608, count), form, stand(torch.int8, 3072, columns), parts,
                stand(dtype, 3072) if next(biased) else None, stand(dtype, 4608, 3072), of_size,
            )  # fmt: skip
            kernel = "by rule in tiles" if size else "by rule"
            name = f"{of_size.rows}x{of_size.columns}, tiles of {size}, {columns} columns, as {dtype}"
            yield Configuration(kernel, name, of, of.arguments["BLOCK_N"] * of.arguments["BLOCK_K"])


def scalings(target: Target) -> Iterator[Configuration]:
    for dtype in DTYPES:
        of, out = stand(torch.float32 if dtype == torch.float16 else dtype, 4608, 3072), stand(dtype, 4608, 3072)
        made = scheme_scaling.scaling(of, stand(of.dtype, 4608), stand(of.dtype, 3072), stand(dtype, 3072), out)
        yield Configuration("scaling", f"{of.dtype} as {dtype}", made, 8 * 256)


def gatherings(target: Target) -> Iterator[Configuration]:
    order, factors = torch.empty(1, dtype=torch.int32), torch.empty(1)
    for dtype, of in product(DTYPES, ((order, factors), (order, None), (None, factors))):
        made = gathering.gathering(stand(dtype, 4608, 3072), *of, stand(dtype, 4608, 3072))
        name = f"{dtype}, {'in order' if of[0] is None else 'ordered'}{'' if of[1] is None else ', times factors'}"
        yield Configuration("gather", name, made, made.arguments["BLOCK_M"] * made.arguments["BLOCK_K"])


# Kernels by the names of their functions: what their launchers choose on a target.
KERNELS: dict[str, Callable[[Target], Iterator[Configuration]]] = {
    "decode_kernel": decoding,
    "one_row_kernel": products,
    "rows_kernel": products,
    "again_kernel": requantizations,
    "quantize_kernel": quantizations,
    "rotate_kernel": rotations,
    "branch_kernel": branches,
    "down_kernel": of_sides,
    "up_kernel": of_sides,
    "expand_kernel": expansions,
    "finish_kernel": finishing,
    "product_kernel": by_row,
    "runs_kernel": by_run,
    "tiles_kernel": tile_codes,
    "numbers_kernel": numbers,
    "scaling_kernel": scalings,
    "gather_kernel": gatherings,
    "tiled_product_kernel": by_tile,
}


def configurations(target: Target) -> Iterator[Configuration]:
    """All of them."""
    for rows in dict.fromkeys(KERNELS.values()):
        yield from rows(target)

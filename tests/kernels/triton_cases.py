"""What the Triton kernels are held to: packed weights of every form, made here from random bytes, and activations.

The tests run this as a program of its own in Triton's interpreter (`python -m tests.kernels.triton_cases`), which has
to be chosen before triton is imported, and in their own process on a card. It prints what is wrong, a line for each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from itertools import product as cartesian
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdquant.backends._gguf_blocks import apart, together
from sdquant.backends._gguf_decode import DECODERS, decode_blocks
from sdquant.core.gguf_types import TYPES
from sdquant.core.low_rank import LowRank
from sdquant.core.packed_layout import PackedLayout
from sdquant.kernels.row_codes import RowCodes
from sdquant.kernels.triton import imports
from sdquant.kernels.triton.blocks import GGUF
from sdquant.kernels.triton.triton_kernels import TritonReader

from .reference import decoded

DTYPES = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # and half a step of each at 1


GROUPS = (64, 4, 8, 16, 32, 128, 256, 1024)  # columns that are rotated together

_E8M0 = "float8_e8m0fnu"  # the slow job of old versions has no such dtype


@dataclass(frozen=True)
class Case:
    name: str
    form: PackedLayout
    parts: dict[str, Tensor]

    def weight(self) -> Tensor:
        """float32 [rows, columns] before the last rounding, computed without Triton."""
        if self.form.packing in DECODERS:
            out = torch.empty(self.form.rows, self.form.columns)
            codes = self.parts["codes"]
            blocks = together(self.form.packing, codes) if self.form.apart else codes
            decode_blocks(self.form.packing, blocks, out)
            return out
        return torch.from_numpy(decoded(self.form, self.parts))


def _bytes(random: np.random.Generator, count: int) -> Tensor:
    return torch.from_numpy(random.integers(0, 256, count, dtype=np.uint8))


def _floats(random: np.random.Generator, count: int, dtype: str) -> Tensor:
    return torch.from_numpy(random.uniform(0.01, 0.05, count).astype(np.float32)).to(getattr(torch, dtype))


# Bytes for so many weights: (bytes, weights).
_PACKED = {
    "nibbles-low": (1, 2), "nibbles-high": (1, 2), "sdnq6": (3, 4), "sdnq3": (3, 8),
    "twos": (2, 8), "threes": (3, 8), "fives": (5, 8), "sixes": (6, 8), "sevens": (7, 8),
}  # fmt: skip


def _case(name: str, rows: int, columns: int, packing: str, group: int, *, scales: str = "float32", **more) -> Case:  # type: ignore[no-untyped-def]
    """`more`: fields of the form. scales: dtype of scale and shift; "" for none."""
    random = np.random.default_rng(len(name) * 7919 + rows)
    count = rows * columns
    groups = -(-count // group) * more.get("taps", 1)
    parts = {}
    if packing.startswith("planes"):
        codes = _bytes(random, -(-groups * int(packing[-1]) // 8) * group)
    else:
        size, many = _PACKED.get(packing, (1, 1))
        codes = _bytes(random, -(-count // many) * size)
    if packing.startswith("float8"):
        wide = torch.from_numpy(random.normal(0, 50, count).astype(np.float32))
        wide[:300] = torch.linspace(-0.02, 0.02, 300)  # the numbers below the least exponent
        codes = wide.to(getattr(torch, packing))
    parts["codes"] = codes.view(torch.int8) if packing == "int8" else codes
    if more.get("nested"):
        parts |= {"scale": _bytes(random, groups), "nested": _floats(random, -(-groups // 256), "float32")}
    elif scales == "float8_e8m0fnu":
        exponents = torch.from_numpy(random.integers(110, 125, groups, dtype=np.uint8))
        if group < 16:  # of which there are no products: numbers of all sizes, and those that are none
            exponents = torch.arange(groups).to(torch.uint8)
        parts["scale"] = exponents.view(getattr(torch, scales))
    elif scales:
        parts["scale"] = _floats(random, groups, scales)
    if more.get("zero") == "zero":
        zeros = _bytes(random, -(-groups // 2) if more.get("zero_packing") == "nibbles-low" else groups)
        parts["zero"] = zeros.view(torch.int8) // 16 if more.get("zero_packing") == "int8" else zeros
    if more.get("shift"):
        parts["shift"] = _floats(random, groups, scales)
    form = PackedLayout(
        rows=rows, columns=columns, codes="codes", packing=packing, group=group, scale="scale" if scales else "", **more
    )
    return Case(name, form, parts)


def blocks_of(kind: str, rows: int, columns: int) -> Case:
    """Random GGUF blocks whose half-precision numbers are small."""
    random = np.random.default_rng(len(kind) + rows)
    row = TYPES[kind]
    count = rows * columns // row.block
    blocks = _bytes(random, count * row.nbytes).view(count, row.nbytes)
    for at in TYPES[kind].halves:
        numbers = _floats(random, count, "float16")
        blocks[:, at : at + 2] = numbers.view(torch.uint8).view(count, 2)
    if kind == "iq1_m":  # whose number is in the upper four bits of four others
        bits = _floats(random, count, "float16").view(torch.uint8).view(count, 2)
        fours = torch.stack((bits & 15, bits >> 4), dim=2).flatten(1)
        blocks[:, 49:56:2] = (blocks[:, 49:56:2] & 15) | fours << 4
    if kind == "mxfp4":
        blocks[:, 0] = torch.from_numpy(random.integers(110, 125, count, dtype=np.uint8))
    form = PackedLayout(rows=rows, columns=columns, codes="codes", packing=kind, group=row.block)
    return Case(f"{kind} {rows}x{columns}", form, {"codes": blocks})


def every_scale_of(kind: str, bytes_of: int) -> Case:
    """Blocks whose scales, in their first bytes, are all numbers of a byte that files may have; of rows that have no
    products."""
    count, largest = 256 // bytes_of, 252 if kind == "mxfp4" else 255  # above, 12 times a power of two is no float32
    case = blocks_of(kind, count * TYPES[kind].block // 16, 16)
    case.parts["codes"][:, :bytes_of] = torch.arange(256).clamp(max=largest).to(torch.uint8).view(count, bytes_of)
    return replace(case, name=f"{kind} of every scale")


def apart_of(case: Case) -> Case:
    """The same weight with its fields apart."""
    parts = {"codes": apart(case.form.packing, case.parts["codes"])}
    return Case(f"{case.name} apart", replace(case.form, apart=True), parts)


def cases() -> Iterator[Case]:
    # Each backend's form, as `test_packed_layout` sees them; rows that are no multiple of a tile.
    yield _case("int8 rows", 37, 96, "int8", 96, arithmetic="bfloat16", scales="bfloat16")
    yield _case("int8 factor", 33, 64, "int8", 64, factor=7.874015718698502e-3)
    yield _case("int8 whole", 5, 64, "int8", 320)
    yield _case("int8 odd", 7, 37, "int8", 37)
    yield _case("uint8 zero", 40, 64, "uint8", 64, zero="zero", arithmetic="float16", scales="float16")
    yield _case("uint8 e4m3", 33, 64, "uint8", 256, table="e4m3")
    yield _case("e4m3 rows", 9, 128, "float8_e4m3fn", 128)
    yield _case("e4m3 plain", 9, 128, "float8_e4m3fn", 9 * 128, scales="")
    yield _case("e4m3 groups", 9, 128, "float8_e4m3fn", 64, arithmetic="bfloat16", scales="bfloat16")
    yield _case("e5m2", 9, 128, "float8_e5m2", 128)
    yield _case("nf4", 34, 192, "nibbles-high", 64, table="nf4")
    yield _case("nf4 across rows", 5, 36, "nibbles-high", 64, table="nf4")
    yield _case("nf4 odd", 5, 37, "nibbles-high", 64, table="nf4")
    yield _case("fp4 nested", 66, 512, "nibbles-high", 64, table="fp4", nested="nested", offset=0.03125)
    zeros = {"zero": "zero", "zero_packing": "nibbles-low"}
    yield _case("int4 zeros", 35, 96, "nibbles-low", 32, arithmetic="float16", scales="float16", **zeros)
    yield _case("int4 rows", 6, 50, "nibbles-low", 50, arithmetic="float16", scales="float16", **zeros)
    yield _case("int4 number", 35, 64, "nibbles-low", 64, zero=8, arithmetic="float16", scales="float16")
    shifted = {"shift": "shift"}
    yield _case("planes4", 40, 128, "planes4", 128, arithmetic="bfloat16", scales="bfloat16", **shifted)
    yield _case("planes4 short", 33, 32, "planes4", 32, arithmetic="bfloat16", scales="bfloat16", **shifted)
    yield _case("planes4 narrow", 6, 27, "planes4", 27, arithmetic="float16", scales="float16", **shifted)
    yield _case("planes4 zero", 8, 96, "planes4", 32, zero="zero", zero_packing="int8")
    yield _case("planes2", 36, 128, "planes2", 64, **shifted)
    yield _case("threes", 8, 96, "threes", 32, **shifted)
    yield _case("threes across rows", 8, 40, "threes", 64, **shifted)
    yield _case("twos", 9, 64, "twos", 64, zero=2)
    yield _case("fives", 9, 64, "fives", 32, zero=16, scales="bfloat16", arithmetic="bfloat16")
    yield _case("sixes across rows", 8, 40, "sixes", 64, zero=32)
    yield _case("sevens", 9, 48, "sevens", 48, zero=64)
    added = {"shift": "shift", "added": True, "fused": True}
    yield _case("sdnq6", 9, 64, "sdnq6", 64, zero=32)
    yield _case("sdnq4", 9, 64, "nibbles-low", 64, arithmetic="bfloat16", scales="bfloat16", **added)
    yield _case("sdnq4 float32", 9, 64, "nibbles-low", 64, **added)
    yield _case("nvfp4", 34, 96, "nibbles-low", 16, table="e2m1", scales="float8_e4m3fn", factor=0.0371)
    yield _case("mxfp4", 9, 64, "nibbles-low", 32, table="e2m1", scales=_E8M0)
    yield _case("mxfp8", 33, 96, "float8_e4m3fn", 32, scales=_E8M0)
    yield _case("int8 all exponents", 32, 64, "int8", 8, scales=_E8M0)
    yield _case("int8 sixteens", 33, 48, "int8", 16)
    yield _case("sdnq4 taps", 6, 576, "nibbles-low", 288, taps=9, **added)
    yield _case("int8 taps", 7, 288, "int8", 144, taps=9, zero=3, arithmetic="bfloat16", scales="bfloat16")
    yield _case("int4 turns", 12, 64, "nibbles-low", 768, taps=24, zero=8, **shifted)  # HQQ, axis 0
    yield _case("sdnq3", 9, 64, "sdnq3", 64, arithmetic="float16", scales="float16", **added)
    columns = {32: 96, 64: 192, 256: 512}
    blocks = [blocks_of(kind, 33 if kind in ("q8_0", "q4_k") else 6, columns[TYPES[kind].block]) for kind in GGUF]
    blocks.append(blocks_of("q4_k", 6, 128))  # blocks that cross rows, as in a reshaped convolution
    blocks.append(blocks_of("q4_0", 4, 24))
    blocks += [every_scale_of("mxfp4", 1), every_scale_of("nvfp4", 4)]
    for case in blocks:
        yield case
        yield apart_of(case)


def undefined_shifts() -> list[str]:
    """A list that grows by each shift in Triton's interpreter by fewer than no bits, or by all bits and more.

    numpy gives a number for these, of which a bit may be masked out again. LLVM may give any, and has.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    found: list[str] = []
    compute = InterpreterBuilder.binary_op

    def checked(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if operation in (np.left_shift, np.right_shift):
            bits = 8 * left.data.dtype.itemsize
            bad = right.data[(right.data < 0) | (right.data >= bits)]
            found.extend(f"{bits} bits are shifted by {n}" for n in np.unique(bad))
        return compute(self, left, right, operation)

    InterpreterBuilder.binary_op = checked
    return found


def wrong_weight(case: Case, dtype: torch.dtype, device: str) -> str:
    """What is wrong with the decoded weight, "" for nothing."""
    parts = {name: part.to(device) for name, part in case.parts.items()}
    reader = TritonReader()
    if not reader.reads(case.form, parts, dtype):
        return "it is not read"
    # One more number, which must stay.
    out = torch.full((case.form.rows * case.form.columns + 1,), 7.0, dtype=dtype, device=device)
    reader.decode_into(case.form, parts, out[:-1].view(case.form.rows, case.form.columns))
    wanted = case.weight().to(dtype)
    found = out[:-1].view(wanted.shape).cpu()
    if out[-1] != 7.0:
        return "it writes beyond the end"
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return "" if bool(same.all()) else f"{int((~same).sum())} of {same.numel()} weights differ"


def wrong_product(case: Case, m: int, dtype: torch.dtype, device: str) -> str:
    """What is wrong with a product of m rows."""
    parts = {name: part.to(device) for name, part in case.parts.items()}
    x = torch.randn(m, case.form.columns, generator=torch.Generator().manual_seed(m)).to(dtype)
    out = torch.full((m * case.form.rows + 1,), 7.0, dtype=dtype, device=device)
    bias = torch.linspace(-1, 1, case.form.rows).to(dtype)
    TritonReader().product(case.form, parts, x.to(device), bias.to(device), out[:-1].view(m, case.form.rows))
    if out[-1] != 7.0:
        return "it writes beyond the end"
    wide, weight = x.double().numpy(), case.weight().to(dtype).double().numpy()
    exact, added = wide @ weight.T + bias.double().numpy(), bias.double().abs().numpy()
    # A sum of n numbers in float32 is off by at most n 2^-24 of their magnitudes; then comes the last rounding.
    bound = (case.form.columns + 1) * 2.0**-24 * (np.abs(wide) @ np.abs(weight.T) + added)
    bound = bound + DTYPES[dtype] * (np.abs(exact) + bound) + 2.0**-25
    error = np.abs(out[:-1].view(m, -1).cpu().double().numpy() - exact)
    return "" if bool((error <= bound).all()) else f"{(error / bound).max():.3g} times the bound"


def wrong_activations(dtype: torch.dtype, codes: torch.dtype, device: str) -> str:
    """What is wrong with quantized rows, by the formulas in numpy."""
    eight = imports.eight(torch.device(device))
    assert eight is not None
    x = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1] = 0
    x[2] *= 1e-4
    largest = np.float32({torch.int8: 127.0, torch.float8_e4m3fn: 448.0}[codes])
    x[3, :255] = torch.arange(-127, 128) * (0.5 if codes == torch.int8 else 1.0)  # halves between codes
    x[3, 255] = float(largest)
    found, scale, sums = eight.quantize_rows(x.to(device), codes)
    wide = x.float().numpy()
    most = np.abs(wide).max(1, keepdims=True)
    if not np.array_equal(scale.cpu().numpy(), most / largest):
        return "the scales differ"
    by = np.where(most == 0, np.float32(0), largest / np.where(most == 0, np.float32(1), most))
    right = torch.from_numpy(wide * by)
    right = right.round().to(torch.int8) if codes == torch.int8 else right.to(codes)
    if not torch.equal(found.cpu().view(torch.uint8), right.view(torch.uint8)):
        return "the codes differ"
    if codes == torch.int8 and not np.array_equal(sums.cpu().numpy(), right.numpy().sum(1, keepdims=True)):
        return "the sums differ"
    x[4, 100] = torch.nan
    _, scale, _ = eight.quantize_rows(x.to(device), codes)
    return "" if bool(scale[4].isnan()) and not bool(scale[:4].isnan().any()) else "NaN does not show in the scale"


def wrong_rotation(group: int, dtype: torch.dtype, device: str) -> str:
    """What is wrong with rotations: of the C kernels, bit for bit, or as close as float32 is to the exact ones."""
    from sdquant.core.hadamard import is_regular, rotate_by_matrix
    from sdquant.kernels.cpu.rotation import rotate_rows
    from sdquant.kernels.triton import int8_gemm, rotation

    x = torch.randn(3, group * (3 if group < 1024 else 1), generator=torch.Generator().manual_seed(group)).to(dtype)
    x[1] *= 1e-3
    x[2, : group // 2] = torch.nan
    got, exact = rotation.rotate_columns(x.to(device), group).cpu(), rotate_by_matrix(x.double(), group)
    if not torch.equal(got.isnan(), exact.isnan()) or got.dtype != dtype:
        return "NaN spreads to other groups"
    most = (torch.finfo(dtype).eps + 2e-6) * exact.nan_to_num().abs().amax(1, keepdim=True)
    if bool(((got.double() - exact).nan_to_num().abs() > most).any()):
        return "it is far from the matrix"
    by_c = rotate_rows(x, group) if is_regular(group) else None
    if by_c is not None and not torch.equal(got.nan_to_num(), by_c.nan_to_num()):
        return "it is not the rotation in C"
    at_once = int8_gemm.quantize_rows(x[:2].to(device), rotation=group)
    before = int8_gemm.quantize_rows(rotation.rotate_columns(x[:2].float().to(device), group))
    same = all(torch.equal(one, other) for one, other in zip(at_once, before, strict=True) if one is not None)  # type: ignore[arg-type]
    return "" if same else "its codes differ from those of rotated rows"


BRANCHES = (LowRank(residual=(), down="down", up="up"), LowRank(residual=(), down="down", up="up", is_turned=True))


def wrong_branch(case: Case, rank: int, of: torch.dtype, dtype: torch.dtype, device: str) -> str:
    """What is wrong with a weight that has a low-rank branch, decoded whole, in all ways that branches are stored."""
    from sdquant.kernels.triton import branch as kernels

    generator, form = torch.Generator().manual_seed(rank), case.form
    up, down = (torch.randn(n, rank, generator=generator).to(of) for n in (form.rows, form.columns))
    smooth, of_rows = (torch.rand(n, generator=generator).add_(0.5).to(of) for n in (form.columns, form.rows))
    residual, product = case.weight().double(), up.double() @ down.double().T
    sizes = residual.abs() * 3 + up.double().abs() @ down.double().abs().T
    for shape, is_smooth, by_rows in cartesian(BRANCHES, (True, False), (True, False)):
        branch = replace(shape, smooth="smooth" if is_smooth else "", rows="rows" if by_rows else "")
        right = down.T.contiguous() if branch.is_turned else down
        stored = {**case.parts, "up": up, "down": right, "smooth": smooth, "rows": of_rows}
        parts = {name: part.to(device) for name, part in stored.items()}
        out = torch.full((form.rows * form.columns + 1,), 7.0, dtype=dtype, device=device)
        to = out[:-1].view(form.rows, form.columns)
        kernels.decoding_with_branch(form, parts, branch, parts, to)(to.device)
        wanted = residual / smooth.double() if is_smooth else residual
        wanted = (wanted * of_rows.double()[:, None] if by_rows else wanted) + product
        if out[-1] != 7.0:
            return "it writes beyond the end"
        error = (to.cpu().double() - wanted).abs()
        if bool((error > 2 * DTYPES[dtype] * wanted.abs() + 2.0**-18 * sizes).any()):
            return f"numbers differ with {branch}"
        width = max(16, 1 << (rank - 1).bit_length())
        out = torch.full((form.rows * (form.columns + width) + 1,), 7.0, dtype=dtype, device=device)
        to = out[:-1].view(form.rows, form.columns + width)
        kernels.decoding_with_branch(form, parts, branch, parts, to)(to.device)
        found, right = to.cpu()[:, : form.columns], to.cpu()[:, form.columns :]
        wanted = residual * of_rows.double()[:, None] if by_rows else residual
        error = (found.double() - wanted).abs()
        if bool((error > 2 * DTYPES[dtype] * wanted.abs() + 2.0**-18 * residual.abs()).any()) or out[-1] != 7.0:
            return f"numbers to the left of the second side differ with {branch}"
        if not torch.equal(right[:, :rank], up.to(dtype)) or right[:, rank:].any():
            return f"the second side differs with {branch}"
    return ""


Sides = tuple[int, int, int, int, torch.dtype, torch.dtype | None, int]  # m, columns, rows, rank, of, codes, rotation
SIDES: tuple[Sides, ...] = (
    (19, 160, 70, 20, torch.bfloat16, torch.int8, 0),
    (5, 384, 40, 16, torch.float16, None, 128),
    (1, 512, 64, 32, torch.bfloat16, None, 256),
    (33, 256, 130, 40, torch.bfloat16, torch.float8_e4m3fn, 64),
    (17, 96, 33, 5, torch.float16, torch.int8, 0),
    (40, 128, 96, 128, torch.bfloat16, None, 0),
)


def wrong_sides(of: Sides, dtype: torch.dtype, device: str) -> str:
    """What is wrong with the launches before and after the product with a residual, in all ways of storing branches."""
    from sdquant.kernels.triton import branch_sides, int8_gemm, rotation

    m, columns, rows, rank, side, eight, group = of
    generator = torch.Generator().manual_seed(rank)
    up, down = (torch.randn(n, rank, generator=generator).to(side) for n in (rows, columns))
    smooth, of_rows = (torch.rand(n, generator=generator).add_(0.5).to(side) for n in (columns, rows))
    x, y = (torch.randn(m, n, generator=generator).to(dtype) for n in (columns, rows))
    bias, width, middle = torch.randn(rows).to(dtype), branch_sides.width_of(rank), branch_sides.dtype_between(dtype)
    changed = rotation.butterflies(x, group).to(dtype) if group else x
    product = changed.double() @ (down.to(dtype) if dtype == torch.bfloat16 else down).double()
    sizes = changed.double().abs() @ down.double().abs()
    for shape, is_smooth, by_rows in cartesian(BRANCHES, (True, False), (True, False)):
        branch = replace(shape, smooth="smooth" if is_smooth else "", rows="rows" if by_rows else "")
        stored = {
            "up": up,
            "down": down.T.contiguous() if branch.is_turned else down,
            "smooth": smooth,
            "rows": of_rows,
        }
        parts = {name: part.to(device) for name, part in stored.items()}
        left = (changed / smooth).to(dtype) if is_smooth else changed
        wide = torch.full((m + 1, columns + 16), 7.0, dtype=dtype, device=device)
        inputs, between = branch_sides.Inputs(wide[:-1, :columns]), torch.empty(m, width, dtype=middle, device=device)
        codes = scale = sums = None
        if eight is not None:
            codes = torch.empty(m, columns, dtype=eight, device=device)
            scale = torch.empty(m, 1, device=device)
            sums = torch.empty(m, 1, dtype=torch.int32, device=device) if eight == torch.int8 else None
            inputs = branch_sides.Inputs(codes, scale, sums)
        branch_sides.down(x.to(device), branch, parts, inputs, between, group)(between.device)
        if codes is None:
            values = wide.cpu()
            if (
                not torch.equal(values[:m, :columns], left)
                or (values[m] != 7).any()
                or (values[:, columns:] != 7).any()
            ):
                return f"what the residual is multiplied by differs with {branch}"
        else:
            wanted = int8_gemm.quantize_rows(left.to(device), eight, sums=sums is not None)
            if not torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8)) or not torch.equal(
                scale, wanted[1]
            ):
                return f"codes or scales differ with {branch}"
            if sums is not None and not torch.equal(sums, wanted[2]):
                return f"sums differ with {branch}"
        error = (between.cpu()[:, :rank].double() - product).abs()
        if bool((error > 2 * DTYPES[middle] * product.abs() + 2.0**-18 * sizes).any()) or between[:, rank:].any():
            return f"the product with the first side differs with {branch}"
        out = torch.full((m * rows + 1,), 7.0, dtype=dtype, device=device)
        to = out[:-1].view(m, rows).copy_(y)
        branch_sides.up(to, branch, parts, between, to, bias.to(device) if by_rows else None)(to.device)
        before = (y * of_rows.to(dtype) + bias) if by_rows else y
        right = (up.to(dtype) if dtype == torch.bfloat16 else up).double()
        results = before.double() + between.cpu()[:, :rank].double() @ right.T
        bound = 4 * DTYPES[dtype] * (results.abs() + before.double().abs() + bias.double().abs())
        if out[-1] != 7.0 or bool(((to.cpu().double() - results).abs() > bound + 2.0**-12).any()):
            return f"the results differ with {branch}"
    return ""


def wrong_expansion(bits: int, group: int, of_rows: bool, dtype: torch.dtype, device: str) -> str:
    """What is wrong with the 8-bit integers that codes of 4 and 6 bits stand for; torch's."""
    from sdquant.kernels.expansion import expand_rows

    generator = torch.Generator().manual_seed(bits + group)
    rows, columns = 5, 1152
    codes = torch.randint(0, 256, (rows, columns * bits // 8), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(rows, columns // group, generator=generator) * 60).to(dtype)
    low = torch.stack((codes[:, : columns // 2] & 15, codes[:, : columns // 2] >> 4), -1).flatten(1).long()
    table = None
    if bits == 4:
        table = torch.rand((rows, 16) if of_rows else (16,), generator=generator) * 8 - 4
        values = table.expand(rows, 16).gather(1, low)
    else:
        high = torch.stack([codes[:, columns // 2 :] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)
        values = (low | high.long() << 4).float() - 32
    wanted = (values.view(rows, -1, group) * scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
    on_device = None if table is None else table.to(device)
    channel = torch.rand(rows, 1, generator=generator)
    for to, factor in ((torch.int8, None), (torch.bfloat16, channel.to(device))):
        out = torch.full((rows * columns + 1,), 99, dtype=to, device=device)
        of = out[:-1].view(rows, columns)
        if torch.device(device).type == "cpu":  # where C does it
            from sdquant.kernels.triton import expansion

            expansion.expansion(codes, bits, scale, on_device, of, factor)(of.device)
        elif not expand_rows(codes.to(device), bits, scale.to(device), on_device, of, factor):
            return "there is no kernel for it"
        if out[-1] != 99:
            return "it writes beyond the end"
        right = wanted.view(rows, columns) if factor is None else (wanted.view(rows, -1).float() * channel).to(to)
        if not torch.equal(of.cpu(), right):
            return f"numbers in {to} differ"
    return ""


def wrong_again(case: Case, device: str) -> str:
    """What is wrong with the int8 codes of a weight."""
    eight = imports.eight(torch.device(device))
    assert eight is not None
    parts = {name: part.to(device) for name, part in case.parts.items()}
    found, scale = eight.quantize_weight(case.form, parts, torch.int8)
    wide = case.weight().numpy()
    most = np.abs(wide).max(1)
    if not np.array_equal(scale.cpu().numpy(), most / np.float32(127)):
        return "the scales of its int8 codes differ"
    right = np.rint(wide * (np.float32(127) / most)[:, None])
    return "" if np.array_equal(found.cpu().numpy(), right) else "its int8 codes differ"


def wrong_long_rows(text: str, columns: int, device: str) -> str:
    """What is wrong with the int8 codes of rows that do not fit into registers, or in two parts of which one ends."""
    from sdquant import backends
    from sdquant.kernels.triton import int8_gemm

    spec = backends.parse(text)
    backend = spec.scheme.codec
    packed = backend.encode(torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)), spec)
    packed = replace(packed, parts={name: part.to(device) for name, part in packed.parts.items()})
    form, wide = backend.form(packed), backend.decode(packed, torch.float32).cpu().numpy()
    assert form is not None
    codes, scale = int8_gemm.quantize_weight(form, packed.parts, torch.int8)
    most = np.abs(wide).max(1)
    right = np.rint(wide * (np.float32(127) / most)[:, None])
    same = np.array_equal(scale.cpu().numpy(), most / np.float32(127)) and np.array_equal(codes.cpu().numpy(), right)
    return "" if same else "its int8 codes differ"


def scaled(total: np.ndarray, sums: np.ndarray, row: np.ndarray, weight: RowCodes, bias: Tensor | None) -> Tensor:
    """The formula of `int8_linear` for sums [m, n] of signed codes, float32."""
    rows = len(weight.codes)

    def spread(each: Tensor) -> np.ndarray:
        return np.repeat(each.flatten().numpy(), rows // each.numel())

    zero = spread(weight.zero).astype(np.int64) if isinstance(weight.zero, Tensor) else weight.zero
    wide = (total + sums * (weight.shift - zero)).astype(np.float32)
    scale = spread(weight.scale.float()) if weight.scale is not None else np.ones(rows, np.float32)
    wide = wide * row * (scale * np.float32(weight.factor))
    return torch.from_numpy(wide if bias is None else wide + bias.float().numpy())


def row_codes(kind: str, rows: int, columns: int, random: np.random.Generator) -> RowCodes:
    """Random codes with what kinds of weights have beside them."""
    codes = _bytes(random, rows * columns).view(rows, columns)
    signed = codes.view(torch.int8)
    scale = _floats(random, rows, "float32")
    if kind == "symmetric":
        return RowCodes(signed, scale.to(torch.bfloat16))
    if kind == "number":
        return RowCodes(codes, scale.to(torch.float16), 0.37, 77)
    if kind == "each":
        return RowCodes(codes, scale, 1.0, _bytes(random, rows))
    if kind == "signed zeros":
        return RowCodes(signed, scale.view(rows, 1), 1.0, _bytes(random, rows).view(torch.int8))
    if kind == "several":
        return RowCodes(codes, scale[: rows // 5], 1.0, _bytes(random, rows // 5))
    assert kind == "no scales"
    return RowCodes(signed, None, 0.0123)


ROW_CODES = ("symmetric", "number", "each", "signed zeros", "several", "no scales")


def on(weight: RowCodes, device: str) -> RowCodes:
    moved = {name: part.to(device) for name, part in vars(weight).items() if isinstance(part, Tensor)}
    return replace(weight, **moved)


def wrong_finish(dtype: torch.dtype, biased: bool, kind: str, device: str) -> str:
    """What is wrong with a product that is scaled."""
    eight = imports.eight(torch.device(device))
    assert eight is not None
    random = np.random.default_rng(3)
    for m, rows in ((1, 1100), (19, 305)):
        total = random.integers(-(10**6), 10**6, (m, rows), dtype=np.int32)
        sums = random.integers(-500, 500, (m, 1), dtype=np.int32)
        row = random.uniform(1e-3, 1e-2, (m, 1)).astype(np.float32)
        weight = row_codes(kind, rows, 1, random)
        bias = torch.from_numpy(random.normal(size=rows).astype(np.float32)).to(dtype) if biased else None
        out = torch.empty(m, rows, dtype=dtype, device=device)
        tensors = [torch.from_numpy(array).to(device) for array in (total, row, sums)]
        of_bias = None if bias is None else bias.to(device)
        eight.finishing(tensors[0], tensors[1], on(weight, device), of_bias, out, tensors[2])(out.device)
        if not torch.equal(out.cpu(), scaled(total, sums, row, weight, bias).to(dtype)):
            return "numbers differ"
    return ""


# m, rows, columns: rests of every kind, and none.
PRODUCTS = ((5, 35, 37), (70, 130, 176), (33, 65, 128), (130, 300, 256))


def wrong_by_row(dtype: torch.dtype, biased: bool, kind: str, tile: int, device: str) -> str:
    """What is wrong with products of codes with one scale for a row, computed in one launch; numpy's."""
    from sdquant.kernels.triton import int8_gemm

    random = np.random.default_rng(4)
    sizes = int8_gemm.device_tiles(torch.device(device))[0].by_row
    for m, rows, columns in PRODUCTS:
        x = random.integers(-127, 128, (m, columns), dtype=np.int8)
        row = random.uniform(1e-3, 1e-2, (m, 1)).astype(np.float32)
        weight = row_codes(kind, rows, columns, random)
        bias = torch.from_numpy(random.normal(size=rows).astype(np.float32)).to(dtype) if biased else None
        total = x.astype(np.int32) @ weight.signed().numpy().astype(np.int32).T
        sums = x.astype(np.int32).sum(1, keepdims=True)
        wide = torch.full((m, rows + 3), 7.0, dtype=dtype, device=device)
        tensors = [torch.from_numpy(array).to(device) for array in (x, row, sums.astype(np.int32))]
        of_bias = None if bias is None else bias.to(device)
        launch = int8_gemm.product(
            tensors[0], tensors[1], on(weight, device), of_bias, wide[:, :rows], tensors[2], sizes[tile % len(sizes)]
        )
        launch(torch.device(device))
        if not bool((wide[:, rows:] == 7.0).all()):
            return "it writes beyond the end"
        if not torch.equal(wide[:, :rows].cpu(), scaled(total, sums, row, weight, bias).to(dtype)):
            return f"numbers differ for {m} x {rows} x {columns} by tiles of {sizes[tile % len(sizes)]}"
    return ""


def wrong_runs(dtype: torch.dtype, biased: bool, device: str) -> str:
    """What is wrong with products whose weight has several scales in a row; numpy's, run by run."""
    eight = imports.eight(torch.device(device))
    assert eight is not None
    random = np.random.default_rng(4)
    of_sizes = ((5, 33, 2, 64, 1), (70, 130, 3, 128, 1), (70, 130, 3, 64, 1), (9, 16, 2, 64, 9))
    for m, rows, groups, each, taps in of_sizes:
        both = groups == 3 and each == 64
        x, weight = (random.integers(-127, 128, (n, groups, each, taps), dtype=np.int8) for n in (m, rows))
        of_rows = (m, groups if both else 1)
        scale, row = (random.uniform(1e-3, 1e-2, n).astype(np.float32) for n in ((rows, groups, taps), of_rows))
        stored = torch.from_numpy(scale).to(torch.float32 if both else dtype)  # of any dtype, and times a factor
        factor = 1.0 if both else 0.3
        scale = stored.float().numpy() * np.float32(factor)
        bias = torch.from_numpy(random.normal(size=rows).astype(np.float32)).to(dtype) if biased else None
        total = np.zeros((m, rows), np.float32)
        for tap in range(taps):
            for group in range(groups):
                sums = x[:, group, :, tap].astype(np.int32) @ weight[:, group, :, tap].astype(np.int32).T
                part = sums.astype(np.float32) * (row[:, group, None] if both else np.float32(1))
                total += part * scale[:, group, tap]
        total = total if both else total * row
        wanted = total if bias is None else total + bias.float().numpy()
        tensors = [torch.from_numpy(array).to(device) for array in (x, weight, row)]
        tensors.insert(2, stored.to(device))
        tensors[:2] = [tensors[0].view(m, -1), tensors[1].view(rows, -1)]
        wide = torch.full((m, rows + 3), 7.0, dtype=dtype, device=device)
        of_bias = None if bias is None else bias.to(device)
        eight.product_by_run(*tensors, of_bias, wide[:, :rows], factor=factor)(torch.device(device))
        if not bool((wide[:, rows:] == 7.0).all()):
            return "it writes beyond the end"
        if not torch.equal(wide[:, :rows].cpu(), torch.from_numpy(wanted).to(dtype)):
            return "numbers differ"
    return ""


def wrong_integers(text: str, columns: int, device: str, *, apart: bool = False) -> str:
    """What is wrong with a layer's product in integers: all steps by Triton, against those in torch. apart: with the
    fields of GGUF's blocks so."""
    from sdquant import backends
    from sdquant.core.backend import Packed
    from sdquant.kernels import int8_linear, int8_reference

    spec = backends.parse(text)
    backend = backends.get(spec.scheme.backend)
    made = backend.encode(torch.randn(40, columns, generator=torch.Generator().manual_seed(5)), spec)
    made = backend.for_kernels(made) if apart else made
    packed = Packed(spec=made.spec, parts={name: part.to(device) for name, part in made.parts.items()})
    x = torch.randn(21, columns, generator=torch.Generator().manual_seed(6)).to(device)
    bias = torch.linspace(-1, 1, 40, device=device)
    found = int8_linear.by_steps(backend, packed, x, bias, int8_reference.WholeInTriton)
    if text != "int8" and not int8_reference.WholeInTriton(x.device).quantizes(backend, packed, backend.form(packed)):  # type: ignore[arg-type]
        return "it is quantized again in torch"
    return (
        ""
        if torch.equal(found, int8_linear.by_steps(backend, packed, x, bias, int8_reference.Steps))
        else "numbers differ"
    )


def wrong_layer(device: str, *, compile: bool) -> str:
    """What is wrong with a layer in front of it all: the dispatch with its self-check, torch.compile if asked. Its
    weight is laid out as it is for cards."""
    from sdquant import backends
    from sdquant.kernels import dispatch
    from sdquant.nn import quantized_layer

    dispatch._READERS[torch.device(device).type] = (("sdquant.kernels.triton.triton_kernels", "TritonReader"),)
    dispatch.readers.cache_clear()
    spec = backends.parse("q4_0")
    linear = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    layer = quantized_layer(linear, backends.get("gguf").encode(linear.weight.data, spec))
    layer.lay_out(device)
    layer = layer.to(device)
    if layer.part_names != ("fields",):
        return "it is not laid out"
    chosen = dispatch.way(layer._backend, layer.packed, layer._backend.form(layer.packed), torch.bfloat16)
    if chosen.reader is None or chosen.reader.name != "triton" or chosen.few < 1:
        return f"it is read by {chosen}"
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True) if compile else layer
    for m in (1, 5, 70):
        x = torch.randn(m, 64, generator=torch.Generator().manual_seed(m)).to(torch.bfloat16)
        with torch.no_grad():
            found, again = layer(x.to(device)), compiled(x.to(device))
            wanted = torch.nn.functional.linear(x, layer.dequantize().cpu(), linear.bias.cpu())
        if not torch.equal(found, again):
            return "it computes other numbers compiled"
        if not torch.allclose(found.cpu().float(), wanted.float(), rtol=2**-7, atol=2**-7):
            return f"products of {m} rows are wrong"
    return ""


# Weights, activations, tile size, columns, and the weight's calibration: with "minmax" it has zero points, with
# "static" activations have a scale that is known before.
RULES: tuple[tuple[str, str, int | None, int, str], ...] = (
    ("int8", "int8", None, 320, "absmax"), ("int4", "int8", 128, 256, "absmax"), ("int8", "int8", None, 176, "minmax"),
    ("int8", "int4", 192, 384, "absmax"), ("int4", "int4", None, 320, "absmax"),
    ("int8", "int8", None, 16448, "absmax"), ("int4", "int8", None, 320, "static"),
)  # fmt: skip


def wrong_rule(of: tuple[str, str, int | None, int, str], dtype: torch.dtype, device: str) -> str:
    """What is wrong with a linear layer of rules that quantize activations, against the backend's own, to the bit."""
    from sdquant.kernels import scheme_activations
    from sdquant.kernels.triton import scheme_gemm
    from sdquant.rules import QuantizationRule, packed_qarray
    from sdquant.rules.core.static_range import StaticRange

    weight, activations, tile, columns, method = of
    rule = QuantizationRule(
        weight_qtype=weight, act_qtype=activations, tile_size=tile, act_static_scale=method == "static",
        weight_calibration_method="absmax" if method == "static" else method,
    )  # fmt: skip
    draw, static = torch.Generator().manual_seed(columns), None
    if method == "static":
        static = StaticRange(torch.tensor([0.0123]), None)
    made = packed_qarray.encode(torch.randn(72, columns, generator=draw).to(dtype), rule, static)
    packed = replace(made, parts={name: part.to(device) for name, part in made.parts.items()})
    backend = packed.spec.scheme.codec
    form, how = backend.form(packed), backend.activations(packed)
    if form is None or how is None or scheme_activations.coding(form, how) is None:
        return "it has no form"
    x = torch.randn(9, columns, generator=draw) * torch.linspace(-30, 3, 9).exp()[:, None]
    x[1], x[2, 5], x[3, 7] = 0, torch.nan, torch.inf
    x, bias = x.to(device, dtype), torch.linspace(-1, 1, 72).to(device, dtype)
    for added in (bias, None):
        found = scheme_gemm.linear(form, packed.parts, how, x, added)
        wanted = backend.linear(packed, x)
        wanted = wanted if added is None else wanted + added
        if not torch.equal(found.isnan(), wanted.isnan()) or not torch.equal(found.nan_to_num(), wanted.nan_to_num()):
            return "numbers differ"
    return ""


# Of convolutions: weight, kernel, sizes of images, stride, padding, calibration.
CONVOLVED: tuple[tuple[str, int, tuple[int, ...], int, int, str], ...] = (
    ("int8", 3, (2, 24, 5, 6), 1, 1, "absmax"), ("int4", 1, (1, 40, 4, 7), 1, 0, "absmax"),
    ("int8", 3, (1, 16, 9, 8), 2, 1, "minmax"),
)  # fmt: skip


def wrong_rule_convolution(
    of: tuple[str, int, tuple[int, ...], int, int, str], dtype: torch.dtype, device: str
) -> str:  # fmt: skip
    """What is wrong with a convolution of rules that quantize activations, against the backend's own, to the bit."""
    from sdquant.core.packed_layout import Geometry
    from sdquant.kernels import scheme_activations, scheme_convolutions
    from sdquant.rules import QuantizationRule, packed_qarray

    weight, kernel, sizes, stride, padding, method = of
    rule = QuantizationRule(weight_qtype=weight, act_qtype="int8", weight_calibration_method=method)
    draw = torch.Generator().manual_seed(kernel)
    made = packed_qarray.encode(torch.randn(70, sizes[1], kernel, kernel, generator=draw).to(dtype), rule, None)
    packed = replace(made, parts={name: part.to(device) for name, part in made.parts.items()})
    backend = packed.spec.scheme.codec
    form, how = backend.form(packed), backend.activations(packed)
    if form is None or how is None or scheme_activations.coding(form, how) is None:
        return "it has no form"
    x = torch.randn(*sizes, generator=draw) * torch.tensor([1.0, 1e-3])[: sizes[0], None, None, None]
    x, bias = x.to(device, dtype), torch.linspace(-1, 1, 70).to(device, dtype)
    geometry = Geometry(stride=(stride,) * 2, padding=(padding,) * 2, dilation=(1, 1), groups=1)
    found = scheme_convolutions.convolve(form, packed.parts, how, (kernel, kernel), x, bias, geometry)
    wanted = backend.convolve(packed, x, geometry) + bias[:, None, None]
    return "" if torch.equal(found, wanted) else "numbers differ"


# Type of activations, columns, tile, and whether codes are decoded.
NUMBERS = (("int8", 300, 300, True), ("float8_e4m3fn", 300, 300, False), ("int4", 96, 16, True),
           ("float8_e4m3fn", 4500, 4500, True), ("int8", 64, 64, False))  # fmt: skip


def wrong_numbers(name: str, columns: int, tile: int, decoded: bool, dtype: torch.dtype, device: str) -> str:
    """What is wrong with activations that are rounded to codes and stay floats."""
    from sdquant.kernels.triton import scheme_gemm
    from sdquant.rules.core.how_to_quantize import HowToQuantize
    from sdquant.rules.core.numerics import from_codes
    from sdquant.rules.core.qarray import quantize, values
    from sdquant.rules.core.qtypes import qtype

    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(tile)) * torch.linspace(-9, 3, 7).exp()[:, None]
    x[1] = 0
    x, row = x.to(device, dtype), qtype(name)
    expected = quantize(x, HowToQuantize(qtype=name, channelwise_axes=(0,), tiled_axes={1: tile}))
    wanted = values(expected) if decoded else from_codes(expected.qvalue, row, expected.scale.dtype)
    found, scale = scheme_gemm.round_tiles(x, tile, (row.bound, *row.limits), row.kind == "float", decoded)
    if not torch.equal(scale.view(expected.scale.shape), expected.scale):
        return "the scales differ"
    return "" if torch.equal(found, wanted) else "the numbers differ"


def wrong_pieces(text: str, device: str) -> str:
    """What is wrong with rows of a weight that are decoded alone."""
    from sdquant import backends
    from sdquant.kernels.triton import launch

    spec = backends.parse(text)
    backend = spec.scheme.codec
    packed = backend.encode(torch.randn(300, 256, generator=torch.Generator().manual_seed(7)).bfloat16(), spec)
    packed = replace(packed, parts={name: part.to(device) for name, part in packed.parts.items()})
    form, wanted = backend.form(packed), backend.decode(packed, torch.bfloat16)
    assert form is not None
    for start in range(0, 300, launch.ALIGNED_ROWS):
        stop = min(start + launch.ALIGNED_ROWS, 300)
        found = torch.full_like(wanted[: stop - start + 1], torch.nan)
        launch.decode(form, packed.parts, found, start, stop)(found.device)
        if not torch.equal(found[:-1], wanted[start:stop]) or not found[-1].isnan().all():
            return f"rows {start} to {stop} differ, or others are written"
    return ""


def wrong_tiles(device: str) -> str:
    """What is wrong with products in tiles of any size, as they are checked on a card before they are used."""
    from sdquant.kernels.triton import int8_gemm

    return "" if int8_gemm.sound_products(torch.device(device)) else "a product is wrong"


def wrong_scaling(dtype: torch.dtype, device: str) -> str:
    """What is wrong with scales and bias of a float product: torch's steps."""
    from sdquant.kernels.triton import scheme_scaling

    generator = torch.Generator().manual_seed(3)
    of = torch.float32 if dtype == torch.float16 else dtype
    y = torch.randn(2, 13, 331, generator=generator).to(of)
    row_scale, scale = (torch.rand(n, generator=generator).to(of) for n in (26, 331))
    for bias in (None, torch.randn(331, generator=generator).to(dtype)):
        wanted = scheme_scaling.by_torch(y.clone(), row_scale, scale, bias, dtype)
        given = [None if one is None else one.to(device) for one in (y, row_scale, scale, bias)]
        if not torch.equal(scheme_scaling.scale_results(*given, dtype).cpu(), wanted):  # type: ignore[arg-type]
            return f"numbers differ {'without' if bias is None else 'with'} a bias"
    return ""


def wrong_gathering(dtype: torch.dtype, device: str) -> str:
    """What is wrong with activations whose columns are multiplied and gathered; torch's."""
    from sdquant.kernels.triton import gathering

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 9, 331, generator=generator).to(dtype)
    order, factors = torch.randperm(331, generator=generator).to(torch.int32), torch.rand(331, generator=generator) * 3
    for one, by in ((order, factors), (order, None), (None, factors)):
        wanted = x if by is None else (x * by).to(dtype)
        wanted = wanted if one is None else wanted.index_select(-1, one)
        given = [None if of is None else of.to(device) for of in (one, by)]
        if not torch.equal(gathering.gather_columns(x.to(device), *given).cpu(), wanted):
            return f"numbers differ {'in their order' if by is None else 'with factors'}"
    return "" if gathering.sound_gathering(torch.device(device)) else "its own check fails"


Look = tuple[str, Callable[[], str]]


def looks(device: str, *, thorough: bool) -> Iterator[Look]:
    """Each thing to look at: its name, and what says what is wrong with it."""
    reader = TritonReader()
    for number, case in enumerate(cases()):
        # Where one rounding or two shows; and Triton's interpreter makes zeros of bfloat16's smallest numbers.
        alone = case.name.endswith(("of every scale", "of every scale apart"))
        one = torch.float32 if case.form.fused or alone else list(DTYPES)[number % 3]
        dtypes = list(DTYPES) if thorough and not alone else [one]
        for dtype in dtypes:
            yield f"{case.name} as {dtype}", partial(wrong_weight, case, dtype, device)
        if not reader.few(case.form, case.parts, torch.bfloat16):
            continue
        if number % 4 == 0 or thorough:
            yield f"{case.name} again", partial(wrong_again, case, device)
        for dtype in dtypes:
            for m in (1, 2, 17, 70) if thorough else (1, 17):
                yield f"{case.name} times {m} rows of {dtype}", partial(wrong_product, case, m, dtype, device)
    for number, group in enumerate(GROUPS if thorough else GROUPS[:3]):
        yield f"rotated by {group}", partial(wrong_rotation, group, list(DTYPES)[number % 3], device)
    branched = [case for case in cases() if case.name in ("nvfp4", "sdnq4 float32", "int8 sixteens", "planes4 short")]
    for number, case in enumerate(branched if thorough else branched[:2]):
        of, dtype = (torch.bfloat16, torch.float16)[number % 2], list(DTYPES)[-number % 3]
        yield f"{case.name} with a branch", partial(wrong_branch, case, (32, 5, 16, 40)[number], of, dtype, device)
    for dtype in DTYPES:
        yield f"scaled as {dtype}", partial(wrong_scaling, dtype, device)
        yield f"gathered as {dtype}", partial(wrong_gathering, dtype, device)
    for number, sides in enumerate(SIDES if thorough else SIDES[:2]):
        for dtype in DTYPES if thorough else [list(DTYPES)[number % 3]]:
            yield f"sides of a branch {number} as {dtype}", partial(wrong_sides, sides, dtype, device)
    for bits, group, of_rows in ((4, 16, False), (4, 64, True), (6, 16, False), (4, 4, False)):
        for dtype in (torch.float32, torch.float8_e4m3fn) if thorough else (torch.float8_e4m3fn,):
            name = f"{bits} bits in groups of {group} expanded{' by tables of rows' * of_rows}, {dtype}"
            yield name, partial(wrong_expansion, bits, group, of_rows, dtype, device)
    for dtype in DTYPES:
        for codes in (torch.int8, torch.float8_e4m3fn):
            yield f"{dtype} as {codes}", partial(wrong_activations, dtype, codes, device)
        for number, kind in enumerate(ROW_CODES):
            biased = (number + dtype.itemsize) % 2 == 0
            yield f"finished as {dtype}, {kind}", partial(wrong_finish, dtype, biased, kind, device)
            for tile in range(5) if thorough else (number + dtype.itemsize,):
                name = f"codes of rows as {dtype}, {kind}, tile {tile}"
                yield name, partial(wrong_by_row, dtype, not biased, kind, tile, device)
        yield f"by runs as {dtype}", partial(wrong_runs, dtype, dtype != torch.float32, device)
    for number, rule in enumerate(RULES if thorough else RULES[:3]):
        for dtype in DTYPES if thorough else [list(DTYPES)[number % 3]]:
            yield f"rule {rule} as {dtype}", partial(wrong_rule, rule, dtype, device)
    for text, columns in (
        (("nf4", 416), ("q4_k", 17408), ("nf4", 17408), ("q6_k", 2816)) if thorough else (("nf4", 416),)
    ):
        yield f"{text} of {columns} columns again", partial(wrong_long_rows, text, columns, device)
    for number, convolved in enumerate(CONVOLVED if thorough else CONVOLVED[:1]):
        for dtype in DTYPES if thorough else [list(DTYPES)[number % 3]]:
            yield f"rule of {convolved} as {dtype}", partial(wrong_rule_convolution, convolved, dtype, device)
    for number, numbers in enumerate(NUMBERS if thorough else NUMBERS[:2]):
        for dtype in DTYPES if thorough else [list(DTYPES)[number % 3]]:
            yield f"{numbers} as {dtype}", partial(wrong_numbers, *numbers, dtype, device)
    integers = [("int8", 128), ("int4", 128), ("q4_k", 256), ("q8_0", 512), ("sdnq-int8", 512)]
    fields = [("q8_0", 512), ("q6_k", 256)]
    for text, columns in integers if thorough else integers[:2]:  # the others take seconds each in the interpreter
        yield f"{text} in integers", partial(wrong_integers, text, columns, device)
    for text, columns in fields if thorough else fields[:1]:
        yield f"{text} apart in integers", partial(wrong_integers, text, columns, device, apart=True)
    for text in ("nf4", "q8_0", "q6_k", "int4", "qint4", "sdnq-uint3") if thorough else ("nf4",):
        yield f"{text} in pieces", partial(wrong_pieces, text, device)
    if thorough:
        yield "every tile", partial(wrong_tiles, device)
    yield "a layer", partial(wrong_layer, device, compile=thorough)


def faults(device: str, *, thorough: bool, every: int = 1) -> Iterator[str]:
    """A line for everything that is wrong, of all or one in `every`, and a last one: how much was looked at."""
    seen = 0
    for name, look in islice(looks(device, thorough=thorough), None, None, every):
        seen += 1
        if why := look():
            yield f"{name}: {why}"
    yield f"{seen} looked at"


if __name__ == "__main__":
    shifts = undefined_shifts()
    with np.errstate(over="ignore", invalid="ignore"):  # to infinity, and what divides that to NaN, as on a card
        *wrong, last = faults("cpu", thorough="thorough" in sys.argv[1:], every=7 if "few" in sys.argv[1:] else 1)
    print(*wrong, *dict.fromkeys(shifts), last, sep="\n")

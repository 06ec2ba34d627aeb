"""The two sides of a low-rank branch beside a product of its residual: one launch before that product, one after it.

`down` rotates activations and divides them as the weight was, quantizes them for a product in 8 bits, and multiplies
them by the branch's first side. `up` multiplies that by the second side and adds it to the results, together with what
else is left to do to them. Every step is rounded as `linear_with_branch` rounds it.
"""

# ruff: noqa: SIM108  (branches on what is compiled in read better in full)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import LowRank, dtype_name
from .activations import code_of, magnitude, of_largest
from .branch import LEAST_RANK, MOST_RANK, of_branch
from .decoding import rounded
from .int8_gemm import LARGEST, quantize_rows
from .launch_config import EXACT, INTERPRETED, Launch
from .rotation import rotated, steps_of

_ROWS, _COLUMNS, _COLUMNS_EXACT = 16, 128, 32  # of a tile of activations; of products without tensor cores
_MOST_ROTATED = 256  # columns that are rotated within a tile
_SHARED = 40 << 10  # bytes of a program's, for tiles that are on their way
_HIGH, _HIGH_EXACT, _WIDE = 32, 16, 64  # of a tile of results


@triton.jit
def inputs_of(
    x_at, smooth, k, m_there, columns, SMOOTH: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr, BY: tl.constexpr,
    IN: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a tile of activations, rotated if there are STEPS, and the same divided for the residual: float32."""
    k_there = k < columns
    v = tl.load(x_at + k[None, :], mask=m_there[:, None] & k_there[None, :], other=0.0).to(tl.float32)
    if STEPS > 0:
        v = rotated(tl.reshape(v, [BLOCK_M * BLOCK_K]), BLOCK_M * BLOCK_K, STEPS, PAIRS, BY)
        v = rounded(tl.reshape(v, [BLOCK_M, BLOCK_K]), IN, BITS)
    w = v
    if SMOOTH:
        by = tl.load(smooth + k, mask=k_there, other=1.0).to(tl.float32)
        w = rounded(tl.div_rn(v, tl.broadcast_to(by[None, :], v.shape)), IN, BITS)
    return v, w


@triton.jit
def down_kernel(
    x, smooth, down, inputs, scale, sums, between, m_rows, columns, rank, inputs_apart, between_apart,
    SMOOTH: tl.constexpr, TURNED: tl.constexpr, KEPT: tl.constexpr, LARGEST: tl.constexpr, FLOAT8: tl.constexpr,
    SUMS: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr, BY: tl.constexpr, IN: tl.constexpr, OF: tl.constexpr,
    BITS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_M rows of x [m_rows, columns] by `down`, in OF, into `between` [m_rows, RANK].

    KEPT: what the residual is multiplied by goes to `inputs`. With LARGEST that is 8-bit codes, for which rows are read
    a second time, with `scale` and, if asked, `sums`; else activations in their own dtype.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_there = m < m_rows
    m_row = m.to(tl.int64)
    x_at, to = x + m_row[:, None] * columns, inputs + m_row[:, None] * inputs_apart
    r = tl.arange(0, RANK)
    product = tl.zeros([BLOCK_M, RANK], dtype=tl.float32)
    most = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
    for first in range(0, columns, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        v, w = inputs_of(x_at, smooth, k, m_there, columns, SMOOTH, STEPS, PAIRS, BY, IN, BITS, BLOCK_M, BLOCK_K)
        if TURNED:
            side_at = down + r[None, :] * columns + k[:, None]
        else:
            side_at = down + k[:, None] * rank + r[None, :]
        side = tl.load(side_at, mask=(r < rank)[None, :] & (k < columns)[:, None], other=0.0).to(tl.float32)
        side = rounded(side, OF, BITS)
        if BITS or OF == "float32":  # the interpreter has no products of bfloat16
            product = tl.dot(v, side, product, input_precision="ieee")
        elif OF == "bfloat16":
            product = tl.dot(v.to(tl.bfloat16), side.to(tl.bfloat16), product)
        else:
            product = tl.dot(v.to(tl.float16), side.to(tl.float16), product)
        if LARGEST > 0:
            most = tl.maximum(most, magnitude(w))
        elif KEPT:
            tl.store(to + k[None, :], w.to(inputs.dtype.element_ty), mask=m_there[:, None] & (k < columns)[None, :])
    if BITS and between.dtype.element_ty == tl.bfloat16:
        product = rounded(product, "bfloat16", BITS)
    tl.store(between + m_row[:, None] * between_apart + r[None, :], product.to(between.dtype.element_ty),
             mask=m_there[:, None])  # fmt: skip
    if LARGEST > 0:
        by, s = of_largest(tl.max(most, 1), LARGEST)
        total = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.int32)
        for first in range(0, columns, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            v, w = inputs_of(x_at, smooth, k, m_there, columns, SMOOTH, STEPS, PAIRS, BY, IN, BITS, BLOCK_M, BLOCK_K)
            code = code_of(w * by[:, None], FLOAT8)
            total += code
            tl.store(to + k[None, :], code.to(inputs.dtype.element_ty), mask=m_there[:, None] & (k < columns)[None, :])
        tl.store(scale + m, s, mask=m_there)
        if SUMS:
            tl.store(sums + m, tl.sum(total, 1), mask=m_there)


@triton.jit
def up_kernel(
    y, out, between, up, of_rows, bias, m_rows, rows, rank, OF_ROWS: tl.constexpr, BIASED: tl.constexpr,
    OUT: tl.constexpr, OF: tl.constexpr, BITS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add between [m_rows, RANK] times the transposed `up`, in OF, to a tile of y [m_rows, rows], into `out`; multiply
    y by `of_rows` and add a bias before that, if there are such."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK)
    m_there, n_there = m < m_rows, n < rows
    at = m[:, None].to(tl.int64) * rows + n[None, :]
    live = m_there[:, None] & n_there[None, :]
    left = tl.load(between + m[:, None] * RANK + r[None, :], mask=m_there[:, None], other=0.0)
    side_at = up + n[None, :] * rank + r[:, None]
    side = tl.load(side_at, mask=(r < rank)[:, None] & n_there[None, :], other=0.0).to(tl.float32)
    v = tl.load(y + at, mask=live, other=0.0).to(tl.float32)
    if OF_ROWS:
        v = rounded(v * tl.load(of_rows + n, mask=n_there, other=0.0).to(tl.float32)[None, :], OUT, BITS)
    if BIASED:
        v = rounded(v + tl.load(bias + n, mask=n_there, other=0.0).to(tl.float32)[None, :], OUT, BITS)
    side = rounded(side, OF, BITS)
    if BITS or OF == "float32":
        v += tl.dot(left.to(tl.float32), side, input_precision="ieee")
    else:
        v += tl.dot(left, side.to(tl.bfloat16))
    tl.store(out + at, rounded(v, OUT, BITS).to(out.dtype.element_ty), mask=live)


def width_of(rank: int) -> int:
    """Return the numbers in a row of what is between the sides of a branch; those beyond `rank` are zeros."""
    return max(LEAST_RANK, int(triton.next_power_of_2(rank)))


def dtype_between(x: torch.dtype) -> torch.dtype:
    """Return the dtype of that for activations of a dtype: an SVD may put more into it than float16 holds."""
    return torch.float32 if x == torch.float16 else x


def can_rotate(group: int) -> bool:
    """Return whether `down` rotates groups of so many columns itself."""
    return group <= _MOST_ROTATED


@dataclass(frozen=True)
class Inputs:
    """What the residual is multiplied by, which `down` writes: [m, columns], whose columns are side by side.

    Attributes:
        values: activations in their own dtype, or their 8-bit codes; None if nothing is written. scale, sums: float32
            and int32 [m], of codes; sums may be None.
    """

    values: Tensor | None = None
    scale: Tensor | None = None
    sums: Tensor | None = None


def down(
    x: Tensor, branch: LowRank, parts: Mapping[str, Tensor], inputs: Inputs, between: Tensor, rotation: int = 0
) -> Launch:
    """Return the launch that multiplies x [m, columns], contiguous, by the first side of a branch.

    Args:
        parts: what `branch` names. between: [m, `width_of`], of `dtype_between`.
        rotation: of how many columns, which it `can_rotate`; 0 for none.
    """
    (m, columns), sides, values = x.shape, of_branch(branch, parts), inputs.values
    side = sides["down"]
    exact = x.dtype == torch.float32 or (x.dtype == torch.float16 and side.dtype != x.dtype)
    of = torch.float32 if exact else x.dtype
    width, deep = between.shape[1], max(_COLUMNS_EXACT if exact else _COLUMNS, rotation)
    bytes_of = deep * (width * side.element_size() + _ROWS * x.element_size())
    eight = inputs.scale is not None
    arguments = {
        "x": x,
        "smooth": sides["smooth"] if branch.smooth else x,
        "down": side,
        "inputs": x if values is None else values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values,
        "scale": between if inputs.scale is None else inputs.scale,
        "sums": between if inputs.sums is None else inputs.sums,
        "between": between,
        "m_rows": m,
        "columns": columns,
        "rank": sides["up"].shape[1],
        "inputs_apart": columns if values is None else values.stride(0),
        "between_apart": between.stride(0),
        "SMOOTH": bool(branch.smooth),
        "TURNED": branch.is_turned,
        "KEPT": values is not None,
        "LARGEST": LARGEST[values.dtype] if eight and values is not None else 0.0,
        "FLOAT8": eight and values is not None and values.dtype == torch.float8_e4m3fn,
        "SUMS": inputs.sums is not None,
        **steps_of(rotation),
        "IN": dtype_name(x.dtype),
        "OF": dtype_name(of),
        "BITS": INTERPRETED,
        "RANK": width,
        "BLOCK_M": _ROWS,
        "BLOCK_K": deep,
    }
    options = {"num_warps": 8 if exact else 4, "num_stages": max(1, min(3, _SHARED // bytes_of)), **EXACT}
    return Launch(down_kernel, (math.ceil(m / _ROWS),), arguments, options)


def up(
    y: Tensor, branch: LowRank, parts: Mapping[str, Tensor], between: Tensor, out: Tensor, bias: Tensor | None = None
) -> Launch:
    """Return the launch that adds the product with the second side of a branch to y [m, rows], into `out` of the same
    shape, which may be y; both contiguous.

    Args:
        bias: [rows], if the product with the residual is without it, as it is beside factors of rows.
    """
    (m, rows), sides, exact = out.shape, of_branch(branch, parts), between.dtype == torch.float32
    high = _HIGH_EXACT if exact else _HIGH
    arguments = {
        "y": y,
        "out": out,
        "between": between,
        "up": sides["up"],
        "of_rows": sides["of_rows"],
        "bias": out if bias is None else bias,
        "m_rows": m,
        "rows": rows,
        "rank": sides["up"].shape[1],
        "OF_ROWS": bool(branch.rows),
        "BIASED": bias is not None,
        "OUT": dtype_name(out.dtype),
        "OF": dtype_name(between.dtype),
        "BITS": INTERPRETED,
        "RANK": between.shape[1],
        "BLOCK_M": high,
        "BLOCK_N": _WIDE,
    }
    grid = (math.ceil(rows / _WIDE), math.ceil(m / high))
    return Launch(up_kernel, grid, arguments, {"num_warps": 8 if exact else 4, **EXACT})


def sound_sides(device: torch.device) -> bool:
    """Return whether both kernels give the right numbers on a device; checked once, before they are used."""
    return all(_is_right(dtype, eight, device) for dtype in (torch.bfloat16, torch.float16) for eight in (True, False))


def _is_right(dtype: torch.dtype, eight: bool, device: torch.device) -> bool:
    m, columns, rows, rank = 19, 160, 70, 20
    wave = torch.linspace(-50, 50, columns * rows, dtype=torch.float32, device=device).sin()
    x, smooth = wave[: m * columns].view(m, columns).to(dtype), wave[:columns].abs().add(0.5).to(dtype)
    sides = {"down": wave[: columns * rank].view(columns, rank), "up": wave[: rows * rank].view(rows, rank)}
    parts = {name: side.to(dtype).contiguous() for name, side in sides.items()} | {"smooth": smooth}
    branch = LowRank(residual=(), down="down", up="up", smooth="smooth")
    between = torch.empty(m, width_of(rank), dtype=dtype_between(dtype), device=device)
    quotient, bias, y = (x / smooth), wave[:rows].to(dtype), wave[: m * rows].view(m, rows).to(dtype)
    if eight:
        codes = torch.empty(m, columns, dtype=torch.int8, device=device)
        scale, sums = codes.new_empty(m, 1, dtype=torch.float32), codes.new_empty(m, 1, dtype=torch.int32)
        inputs, reference, outputs = Inputs(codes, scale, sums), [*quantize_rows(quotient)], [codes, scale, sums]
    else:
        values = torch.empty_like(x)
        inputs, reference, outputs = Inputs(values), [quotient], [values]
    down(x, branch, parts, inputs, between)(device)
    narrow = x.double() @ parts["down"].double()
    results = y.double() + bias.double() + narrow @ parts["up"].double().t()
    up(y, branch, parts, between, y, bias)(device)
    same = all(b is not None and torch.equal(a, b) for a, b in zip(outputs, reference, strict=True))
    near = torch.allclose(between[:, :rank].double(), narrow, rtol=2**-7, atol=2**-4)
    return same and near and torch.allclose(y.double(), results, rtol=2**-7, atol=2**-3)


def can_multiply(branch: LowRank, parts: Mapping[str, Tensor], rotation: int) -> bool:
    """Return whether the kernels multiply by the sides of this branch."""
    sides = of_branch(branch, parts)
    return (
        can_rotate(rotation)
        and sides["up"].shape[1] <= MOST_RANK
        and all(
            side.is_contiguous() and side.dtype in (torch.float32, torch.bfloat16, torch.float16)
            for side in sides.values()
        )
    )

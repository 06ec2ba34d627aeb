"""8-bit codes of activations, and what is done to an integer product: device code for `eight`."""

# ruff: noqa: SIM108
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import triton
import triton.language as tl

from .decoding import rounded


@triton.jit
def whole(v):
    """v, float32 below 2 ** 22 in magnitude, rounded to a whole number, halves to even: what is added has no bits left
    for fractions."""
    return (v + 12582912.0) - 12582912.0


@triton.jit
def float8_code(v):
    """The float8_e4m3fn code, int32, nearest to v, float32 of at most 448 in magnitude; NaN for NaN.

    By arithmetic, which is the same on cards that have the type and on those that do not.
    """
    bits = v.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Three bits of mantissa stay, halves to even; the exponent's bias is 7 instead of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 codes count steps of 2 ** -9; the eighth is the first number above.
    small = whole(tl.abs(v) * 512.0).to(tl.int32)
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(v == v, code, 0x7F)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def quantize_kernel(x, codes, scale, columns, LARGEST: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr):
    """One row of x [rows, columns] to codes of a byte and one scale: the largest magnitude is LARGEST."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    lane = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], dtype=tl.float32)
    strange = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, columns, BLOCK):
        at = first + lane
        v = tl.load(x + start + at, mask=at < columns, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(v))
        strange = strange | (v != v).to(tl.int32)
    # A maximum passes over NaN; it is to show in the scale, as in torch.
    found = tl.max(most, 0)
    s = tl.div_rn(found, LARGEST)
    s = tl.where(tl.max(strange, 0) > 0, float("nan"), s)
    tl.store(scale + row, s)
    by = tl.where(s == 0.0, 1.0, s)
    for first in range(0, columns, BLOCK):
        at = first + lane
        v = tl.load(x + start + at, mask=at < columns, other=0.0).to(tl.float32)
        v = tl.div_rn(v, tl.broadcast_to(by, v.shape))
        v = tl.minimum(tl.maximum(v, -LARGEST), LARGEST)
        if FLOAT8:
            code = float8_code(v)
        else:
            code = whole(v).to(tl.int32)
        tl.store(codes + start + at, code.to(codes.dtype.element_ty), mask=at < columns)


@triton.jit
def finish_kernel(
    product, out, row_scale, column_scale, bias, rows, columns, BIASED: tl.constexpr, OUT: tl.constexpr,
    BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = product * row_scale * column_scale + bias, one rounding after each; all [rows, columns] contiguous."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = (m < rows)[:, None] & (n < columns)[None, :]
    at = m[:, None].to(tl.int64) * columns + n[None, :]
    v = tl.load(product + at, mask=live, other=0).to(tl.float32)
    of_row = tl.load(row_scale + m, mask=m < rows, other=0.0)
    of_column = tl.load(column_scale + n, mask=n < columns, other=0.0).to(tl.float32)
    v = v * of_row[:, None] * of_column[None, :]
    if BIASED:
        v = v + tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, rounded(v, OUT, BITS).to(out.dtype.element_ty), mask=live)

"""Device code for `int8_gemm`: activations to codes, the epilogue of a GEMM, and a GEMM with several scales per row."""

# ruff: noqa: SIM108
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import triton
import triton.language as tl

from .decoding import position, rounded, values


@triton.jit
def whole(v):
    """Round v, float32 below 2 ** 22 in magnitude, to a whole number, halves to even: the sum has no bits left for
    fractions."""
    return (v + 12582912.0) - 12582912.0


@triton.jit
def float8_code(v):
    """Return the float8_e4m3fn code, int32, nearest to v, float32 of at most 448 in magnitude; NaN for NaN.

    Computed with integer arithmetic, which is the same on GPUs with and without float8 support.
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
def of_largest(largest, strange, LARGEST: tl.constexpr):
    """Return the factor for the values of a row and the scale of their codes, from the largest magnitude in the row.

    A maximum ignores NaN: `strange` says that there was one, which must show in the scale, as in torch. Rows of numbers
    so small that LARGEST / largest overflows count as zeros.
    """
    zero = largest < 7.888609052210118e-31  # 2 ** -100
    by = tl.where(zero, 0.0, tl.div_rn(tl.full([], LARGEST, tl.float32), tl.where(zero, 1.0, largest)))
    scale = tl.where(zero, 0.0, tl.div_rn(largest, tl.full([], LARGEST, tl.float32)))
    return by, tl.where(strange > 0, float("nan"), scale)


@triton.jit
def code_of(v, LARGEST: tl.constexpr, FLOAT8: tl.constexpr):
    """Return the code nearest to v, int32."""
    v = tl.minimum(tl.maximum(v, -LARGEST), LARGEST)
    if FLOAT8:
        code = float8_code(v)
    else:
        code = whole(v).to(tl.int32)
    return code


@triton.jit
def quantize_kernel(x, codes, scale, sums, columns, LARGEST: tl.constexpr, FLOAT8: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize one row of x [rows, columns] to 8-bit codes, their scale, and the sum of integer codes."""
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
    by, s = of_largest(tl.max(most, 0), tl.max(strange, 0), LARGEST)
    tl.store(scale + row, s)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, columns, BLOCK):
        at = first + lane
        v = tl.load(x + start + at, mask=at < columns, other=0.0).to(tl.float32)
        code = code_of(v * by, LARGEST, FLOAT8)
        total += code
        tl.store(codes + start + at, code.to(codes.dtype.element_ty), mask=at < columns)
    if not FLOAT8:
        tl.store(sums + row, tl.sum(total, 0))


@triton.jit
def finish_kernel(
    product, out, row_scale, column_scale, bias, sums, added, rows, columns, out_columns, number,
    BIASED: tl.constexpr, ADDED: tl.constexpr, OUT: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute out = (product + sums * added) * row_scale * column_scale + bias in float32, rounding after each step.

    product [rows, columns]; rows of `out` are `out_columns` apart. ADDED: "", "number", or "each" for one a column.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = (m < rows)[:, None] & (n < columns)[None, :]
    v = tl.load(product + m[:, None].to(tl.int64) * columns + n[None, :], mask=live, other=0)
    if ADDED == "number":
        v += (tl.load(sums + m, mask=m < rows, other=0) * number)[:, None]
    elif ADDED == "each":
        of_row = tl.load(sums + m, mask=m < rows, other=0)
        v += of_row[:, None] * tl.load(added + n, mask=n < columns, other=0)[None, :]
    scale_m = tl.load(row_scale + m, mask=m < rows, other=0.0)
    scale_n = tl.load(column_scale + n, mask=n < columns, other=0.0)
    y = v.to(tl.float32) * scale_m[:, None] * scale_n[None, :]
    if BIASED:
        y = y + tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * out_columns + n[None, :]
    tl.store(out + at, rounded(y, OUT, BITS).to(out.dtype.element_ty), mask=live)


@triton.jit
def again_kernel(
    out, out_scale, per_row, columns, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset,
    factor, number, count, many,
    FAMILY: tl.constexpr, PACKING: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr,
    ORDER: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
    SHIFT: tl.constexpr, FUSED: tl.constexpr, ARITHMETIC: tl.constexpr, CHUNKS: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr, D_STEP: tl.constexpr, Q_STEP: tl.constexpr,
    H_STEP: tl.constexpr, S_STEP: tl.constexpr, Z: tl.constexpr, BITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Requantize one row of a packed weight to int8 codes `out` and their scale, without storing the float weight."""
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)[None, None, :]
    most = tl.zeros([1, BLOCK_C, LANES], dtype=tl.float32)
    strange = tl.zeros([1, BLOCK_C, LANES], dtype=tl.int32)
    for start in range(0, per_row, BLOCK_C):
        c = (start + tl.arange(0, BLOCK_C))[None, :]
        for p in tl.static_range(PLANES):
            v = values(
                codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count,
                many, row * per_row + c, c < per_row, p, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO,
                FACTOR, SHIFT, FUSED, ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS,
            )  # fmt: skip
            v = tl.where((c < per_row)[:, :, None] & (lane >= 0), v, 0.0)
            most = tl.maximum(most, tl.abs(v))
            strange = strange | (v != v).to(tl.int32)
    largest = tl.max(tl.max(tl.max(most, 2), 1), 0)
    by, s = of_largest(largest, tl.max(tl.max(tl.max(strange, 2), 1), 0), 127.0)
    tl.store(out_scale + row, s)
    for start in range(0, per_row, BLOCK_C):
        c = (start + tl.arange(0, BLOCK_C))[None, :]
        for p in tl.static_range(PLANES):
            v = values(
                codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count,
                many, row * per_row + c, c < per_row, p, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO,
                FACTOR, SHIFT, FUSED, ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS,
            )  # fmt: skip
            at = position(c[:, :, None], lane, p, PLANES, LANES, ORDER)
            tl.store(out + row * columns + at, code_of(v * by, 127.0, False).to(tl.int8), mask=at < columns)


@triton.jit
def runs_kernel(
    x, weight, scale, row_scale, bias, out, m_rows, rows, columns, out_columns, groups, each, taps,
    BIASED: tl.constexpr, OUT: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out = (sum over runs of float32(x * weight) * scale) * row_scale + bias, rounding after each step, for
    weights with several scales per row, each for a run of columns.

    cuBLAS would need one GEMM for each run, and as many passes over the results. Here the sums of a run stay in
    registers.

    x, weight: int8 [m_rows, columns] and [rows, columns], columns being [groups, each, taps]; a run is the `each` of
    one group and tap, a multiple of BLOCK_K. scale: [rows, groups, taps]. Rows of `out` are `out_columns` apart.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_K) * taps
    x_at = x + m.to(tl.int64)[:, None] * columns + lane[None, :]
    w_at = weight + n.to(tl.int64)[None, :] * columns + lane[:, None]
    x_there, w_there = (m < m_rows)[:, None], (n < rows)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tap in range(taps):
        for group in range(groups):
            sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
            for first in range(0, each, BLOCK_K):
                k = (group * each + first) * taps + tap
                a = tl.load(x_at + k, mask=x_there, other=0)
                b = tl.load(w_at + k, mask=w_there, other=0)
                sums = tl.dot(a, b, sums, out_dtype=tl.int32)
            s = tl.load(scale + (n * groups + group) * taps + tap, mask=n < rows, other=0.0)
            total += sums.to(tl.float32) * s[None, :]
    y = total * tl.load(row_scale + m, mask=m < m_rows, other=0.0)[:, None]
    if BIASED:
        y = y + tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * out_columns + n[None, :]
    tl.store(out + at, rounded(y, OUT, BITS).to(out.dtype.element_ty), mask=x_there & w_there)

"""Device code for `int8_gemm`: activations and packed weights to 8-bit codes."""

# ruff: noqa: SIM108
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import triton
import triton.language as tl

from .decoding import position, values
from .rotation import rotated


@triton.jit
def nearest(v):
    """Return the whole number nearest to v, float32 below 2 ** 22 in magnitude, halves to even: int32.

    The sum has no bits left for fractions; in its bits whole numbers count up. A conversion takes four times as long.
    """
    return (v + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def magnitude(v):
    """Return the bits of |v|, float32, as int32: in the order of the numbers, and above them those of NaN, which a
    maximum of floats would ignore."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def float8_code(v):
    """Return the float8_e4m3fn code, int32, nearest to v, float32 of at most 448 in magnitude; NaN for NaN.

    Computed with integer arithmetic, which is the same on GPUs with and without float8 support.
    """
    bits, size = v.to(tl.int32, bitcast=True), magnitude(v)
    # Three bits of mantissa stay, halves to even; the exponent's bias is 7 instead of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 codes count steps of 2 ** -9; the eighth is the first number above.
    small = nearest(tl.abs(v) * 512.0)
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(v == v, code, 0x7F)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def of_largest(size, LARGEST: tl.constexpr):
    """Return the factor for the values of a row and the scale of their codes, from the largest `magnitude` in the row,
    or those of several rows.

    The scale of a row that is not finite is NaN, as in torch. Rows of numbers so small that LARGEST / largest overflows
    count as zeros.
    """
    largest = size.to(tl.float32, bitcast=True)
    zero = largest < 7.888609052210118e-31  # 2 ** -100
    most = tl.full(largest.shape, LARGEST, tl.float32)
    by = tl.where(zero, 0.0, tl.div_rn(most, tl.where(zero, 1.0, largest)))
    step = tl.div_rn(largest, most)
    return by, tl.where(zero, 0.0, tl.where(size < 0x7F800000, step, float("nan")))


@triton.jit
def code_of(v, FLOAT8: tl.constexpr):
    """Return the code nearest to v, int32: v is a value times the factor of its row."""
    if FLOAT8:
        code = float8_code(v)
    else:
        code = nearest(v)
    return code


@triton.jit
def quantize_kernel(
    x, codes, scale, sums, columns, x_columns, LARGEST: tl.constexpr, FLOAT8: tl.constexpr, SUMS: tl.constexpr,
    STEPS: tl.constexpr, PAIRS: tl.constexpr, BY: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize one row of x to 8-bit codes [rows, columns], their scale, and the sum of integer codes if asked.

    Rows of x are `x_columns` apart, and `rotated` before, if there are STEPS. WHOLE: rows of up to BLOCK columns stay
    in registers; longer ones are read twice.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row, code_row = x + row * x_columns, codes + row * columns
    lane = tl.arange(0, BLOCK)
    if WHOLE:
        v = tl.load(x_row + lane, mask=lane < columns, other=0.0).to(tl.float32)
        v = rotated(v, BLOCK, STEPS, PAIRS, BY)
        by, s = of_largest(tl.max(magnitude(v), 0), LARGEST)
        total = code_of(v * by, FLOAT8)
        tl.store(code_row + lane, total.to(codes.dtype.element_ty), mask=lane < columns)
    else:
        most = tl.zeros([BLOCK], dtype=tl.int32)
        for first in range(0, columns, BLOCK):
            at = first + lane
            v = tl.load(x_row + at, mask=at < columns, other=0.0).to(tl.float32)
            v = rotated(v, BLOCK, STEPS, PAIRS, BY)
            most = tl.maximum(most, magnitude(v))
        by, s = of_largest(tl.max(most, 0), LARGEST)
        total = tl.zeros([BLOCK], dtype=tl.int32)
        for first in range(0, columns, BLOCK):
            at = first + lane
            v = tl.load(x_row + at, mask=at < columns, other=0.0).to(tl.float32)
            v = rotated(v, BLOCK, STEPS, PAIRS, BY)
            code = code_of(v * by, FLOAT8)
            total += code
            tl.store(code_row + at, code.to(codes.dtype.element_ty), mask=at < columns)
    tl.store(scale + row, s)
    if SUMS:
        tl.store(sums + row, tl.sum(total, 0))


@triton.jit
def plane_values(
    per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count, many,
    first, p: tl.constexpr, FAMILY: tl.constexpr, PACKING: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr,
    ORDER: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
    SHIFT: tl.constexpr, TAPS: tl.constexpr, FUSED: tl.constexpr, ARITHMETIC: tl.constexpr, CHUNKS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr, D_STEP: tl.constexpr,
    Q_STEP: tl.constexpr, H_STEP: tl.constexpr, S_STEP: tl.constexpr, Z: tl.constexpr, BITS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Return plane p of COUNT chunks of this program's row, from the chunk `first` on; zeros beyond its end."""
    c = (first + tl.arange(0, COUNT))[None, :]
    v = values(
        codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count, many,
        tl.program_id(0) * per_row + c, c < per_row, p, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO,
        FACTOR, SHIFT, TAPS, FUSED, ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS,
    )  # fmt: skip
    return tl.where((c < per_row)[:, :, None] & (tl.arange(0, LANES)[None, None, :] >= 0), v, 0.0)


@triton.jit
def row_values(
    per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count, many,
    first, FAMILY: tl.constexpr, PACKING: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr,
    ORDER: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
    SHIFT: tl.constexpr, TAPS: tl.constexpr, FUSED: tl.constexpr, ARITHMETIC: tl.constexpr, CHUNKS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr, D_STEP: tl.constexpr,
    Q_STEP: tl.constexpr, H_STEP: tl.constexpr, S_STEP: tl.constexpr, Z: tl.constexpr, BITS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Return all planes of COUNT chunks: [1, COUNT, LANES], and another dimension of 2 for each doubling of planes."""
    v = plane_values(
        per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number,
        count, many, first, 0, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS,
        FUSED, ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS, COUNT,
    )  # fmt: skip
    if PLANES > 1:
        w = plane_values(
            per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number,
            count, many, first, 1, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS,
            FUSED, ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS, COUNT,
        )  # fmt: skip
        v = tl.join(v, w)
    if PLANES > 2:
        x = plane_values(
            per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number,
            count, many, first, 2, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS,
            FUSED, ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS, COUNT,
        )  # fmt: skip
        y = plane_values(
            per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number,
            count, many, first, 3, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS,
            FUSED, ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS, COUNT,
        )  # fmt: skip
        v = tl.join(v, tl.join(x, y))
    return v


@triton.jit
def largest_of(v):
    """Return the largest `magnitude` of all."""
    return tl.max(tl.reshape(magnitude(v), [v.numel]), 0)


@triton.jit
def store_plane(
    row, columns, code, first, p: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr, ORDER: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Store plane p of COUNT chunks of codes to their places in a row of `columns`."""
    c = (first + tl.arange(0, COUNT))[None, :, None]
    at = position(c, tl.arange(0, LANES)[None, None, :], p, PLANES, LANES, ORDER)
    tl.store(row + at, code, mask=at < columns)


@triton.jit
def store_codes(
    row, columns, v, by, first, FLOAT8: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr, ORDER: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Store the codes of `row_values`, whose factor is `by`."""
    code = code_of(v * by, FLOAT8).to(row.dtype.element_ty)
    if PLANES == 1:
        store_plane(row, columns, code, first, 0, PLANES, LANES, ORDER, COUNT)
    elif PLANES == 2:
        a, b = tl.split(code)
        store_plane(row, columns, a, first, 0, PLANES, LANES, ORDER, COUNT)
        store_plane(row, columns, b, first, 1, PLANES, LANES, ORDER, COUNT)
    else:
        even, odd = tl.split(code)
        a, b = tl.split(even)
        c, d = tl.split(odd)
        store_plane(row, columns, a, first, 0, PLANES, LANES, ORDER, COUNT)
        store_plane(row, columns, b, first, 1, PLANES, LANES, ORDER, COUNT)
        store_plane(row, columns, c, first, 2, PLANES, LANES, ORDER, COUNT)
        store_plane(row, columns, d, first, 3, PLANES, LANES, ORDER, COUNT)


@triton.jit
def again_kernel(
    out, out_scale, per_row, columns, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset,
    factor, number, count, many,
    FAMILY: tl.constexpr, PACKING: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr,
    ORDER: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
    SHIFT: tl.constexpr, TAPS: tl.constexpr, FUSED: tl.constexpr, ARITHMETIC: tl.constexpr, CHUNKS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr, D_STEP: tl.constexpr,
    Q_STEP: tl.constexpr, H_STEP: tl.constexpr, S_STEP: tl.constexpr, Z: tl.constexpr, BITS: tl.constexpr,
    LARGEST: tl.constexpr, FLOAT8: tl.constexpr, WHOLE: tl.constexpr, BLOCK_C: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Requantize one row of a packed weight to 8-bit codes `out` and their scale, without storing the float weight.

    WHOLE: a row is BLOCK_C and REST chunks at most, which stay in registers. A longer one is decoded twice, BLOCK_C
    chunks at a time.
    """
    row = out + tl.program_id(0) * columns
    if WHOLE:
        v = row_values(
            per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number,
            count, many, 0, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS,
            FUSED, ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS, BLOCK_C,
        )  # fmt: skip
        largest = largest_of(v)
        if REST > 0:
            w = row_values(
                per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number,
                count, many, BLOCK_C, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS,
                FUSED, ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS, REST,
            )  # fmt: skip
            largest = tl.maximum(largest, largest_of(w))
        by, s = of_largest(largest, LARGEST)
        store_codes(row, columns, v, by, 0, FLOAT8, PLANES, LANES, ORDER, BLOCK_C)
        if REST > 0:
            store_codes(row, columns, w, by, BLOCK_C, FLOAT8, PLANES, LANES, ORDER, REST)
    else:
        largest = tl.full([], 0, tl.int32)
        for start in range(0, per_row, BLOCK_C):
            v = row_values(
                per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number,
                count, many, start, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS,
                FUSED, ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS, BLOCK_C,
            )  # fmt: skip
            largest = tl.maximum(largest, largest_of(v))
        by, s = of_largest(largest, LARGEST)
        for start in range(0, per_row, BLOCK_C):
            v = row_values(
                per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number,
                count, many, start, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS,
                FUSED, ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS, BLOCK_C,
            )  # fmt: skip
            store_codes(row, columns, v, by, start, FLOAT8, PLANES, LANES, ORDER, BLOCK_C)
    tl.store(out_scale + tl.program_id(0), s)

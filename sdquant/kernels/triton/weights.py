"""Kernels over packed weights: decoding, GEMV with one row of activations, and GEMM with a few.

All take the same arguments to describe the weight (see `launch_config`); those in capitals are compile-time constants.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import triton
import triton.language as tl

from .decoding import position, rounded, values


@triton.jit
def decode_kernel(
    out, first, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count,
    many,
    FAMILY: tl.constexpr, PACKING: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr,
    ORDER: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
    SHIFT: tl.constexpr, TAPS: tl.constexpr, FUSED: tl.constexpr, ARITHMETIC: tl.constexpr, CHUNKS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr, D_STEP: tl.constexpr,
    Q_STEP: tl.constexpr, H_STEP: tl.constexpr, S_STEP: tl.constexpr, Z: tl.constexpr, BITS: tl.constexpr,
    OUT: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Dequantize BLOCK_C chunks of the weight, which has `count` numbers, into `out` of dtype OUT. What the programs
    before `first` would decode is not in `out`."""
    g = ((first + tl.program_id(0)) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    live = g * (PLANES * LANES) < count
    lane = tl.arange(0, LANES)[None, None, :]
    for p in tl.static_range(PLANES):
        v = values(
            codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count,
            many, g, live, p, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS, FUSED,
            ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS,
        )  # fmt: skip
        v = rounded(v, OUT, BITS)
        at = position(g[:, :, None], lane, p, PLANES, LANES, ORDER)
        tl.store(out + (at - first * (BLOCK_C * PLANES * LANES)), v.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def row_of(pid, BLOCK_N: tl.constexpr, rows, SPLIT: tl.constexpr):
    """Return the rows of the weight that program `pid` takes: [BLOCK_N].

    With SPLIT, that many rows which share their bytes (quanto's planes) are in one program: each byte is read once from
    memory, and then from the cache.
    """
    lane = tl.arange(0, BLOCK_N)
    if SPLIT > 1:
        each = BLOCK_N // SPLIT
        per_plane = rows // SPLIT
        within = pid * each + lane % each
        # Beyond the last: no row of this weight.
        n = tl.where(within < per_plane, (lane // each) * per_plane + within, rows)
    else:
        n = pid * BLOCK_N + lane
    return n


@triton.jit
def one_row_kernel(
    x, bias, out, rows, per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor,
    number, count, many,
    FAMILY: tl.constexpr, PACKING: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr,
    ORDER: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
    SHIFT: tl.constexpr, TAPS: tl.constexpr, FUSED: tl.constexpr, ARITHMETIC: tl.constexpr, CHUNKS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr, D_STEP: tl.constexpr,
    Q_STEP: tl.constexpr, H_STEP: tl.constexpr, S_STEP: tl.constexpr, Z: tl.constexpr, BITS: tl.constexpr,
    OUT: tl.constexpr, SPLIT: tl.constexpr, BIASED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Multiply x [columns] by BLOCK_N rows of the weight, whose rows are `per_row` chunks, into out [rows]."""
    n = row_of(tl.program_id(0), BLOCK_N, rows, SPLIT)
    lane = tl.arange(0, LANES)[None, None, :]
    total = tl.zeros([BLOCK_N, BLOCK_C, LANES], dtype=tl.float32)
    for start in range(0, per_row, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        live = (n < rows)[:, None] & (c < per_row)[None, :]
        g = n[:, None] * per_row + c[None, :]
        there = (c < per_row)[None, :, None]
        for p in tl.static_range(PLANES):
            v = values(
                codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count,
                many, g, live, p, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS, FUSED,
                ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS,
            )  # fmt: skip
            k = position(c[None, :, None], lane, p, PLANES, LANES, ORDER)
            a = tl.load(x + k, mask=there & (lane >= 0), other=0.0).to(tl.float32)
            total += rounded(v, OUT, BITS) * a
    y = tl.sum(tl.sum(total, 2), 1)
    if BIASED:
        y += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)
    tl.store(out + n, rounded(y, OUT, BITS).to(out.dtype.element_ty), mask=n < rows)


@triton.jit
def rows_kernel(
    x, bias, out, m_rows, rows, columns, per_row, codes, scale, nested, zero, shift, table, dynamic, group, plane_size,
    offset, factor, number, count, many,
    FAMILY: tl.constexpr, PACKING: tl.constexpr, PLANES: tl.constexpr, LANES: tl.constexpr,
    ORDER: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
    SHIFT: tl.constexpr, TAPS: tl.constexpr, FUSED: tl.constexpr, ARITHMETIC: tl.constexpr, CHUNKS: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, S: tl.constexpr, D_STEP: tl.constexpr,
    Q_STEP: tl.constexpr, H_STEP: tl.constexpr, S_STEP: tl.constexpr, Z: tl.constexpr, BITS: tl.constexpr,
    OUT: tl.constexpr, SPLIT: tl.constexpr, BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Multiply x [m_rows, columns] by BLOCK_N rows of the weight, into out [m_rows, rows].

    The weight is the first operand, which tensor cores take from registers, where it has just been decoded.
    """
    n = row_of(tl.program_id(0), BLOCK_N, rows, SPLIT)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, LANES)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, per_row, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        live = (n < rows)[:, None] & (c < per_row)[None, :]
        g = n[:, None] * per_row + c[None, :]
        for p in tl.static_range(PLANES):
            v = values(
                codes, scale, nested, zero, shift, table, dynamic, group, plane_size, offset, factor, number, count,
                many, g, live, p, FAMILY, PACKING, PLANES, LANES, ORDER, TABLE, SCALE, ZERO, FACTOR, SHIFT, TAPS, FUSED,
                ARITHMETIC, CHUNKS, D, M, Q, H, S, D_STEP, Q_STEP, H_STEP, S_STEP, Z, BITS,
            )  # fmt: skip
            w = tl.reshape(rounded(v, OUT, BITS), [BLOCK_N, BLOCK_C * LANES])
            k = tl.reshape(position(c[:, None], lane, p, PLANES, LANES, ORDER), [BLOCK_C * LANES])
            a = tl.load(x + m[None, :] * columns + k[:, None], mask=(m < m_rows)[None, :] & (k < columns)[:, None],
                        other=0.0)  # fmt: skip
            if BITS:  # the interpreter has no products of bfloat16
                total = tl.dot(w, a.to(tl.float32), total, input_precision="ieee")
            else:
                total = tl.dot(w.to(x.dtype.element_ty), a, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    y = rounded(total, OUT, BITS).to(out.dtype.element_ty)
    tl.store(out + m[None, :] * rows + n[:, None], y, mask=(m < m_rows)[None, :] & (n < rows)[:, None])

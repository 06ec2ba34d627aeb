"""Device code for `int8_gemm`: products of 8-bit codes, scaled and with a bias, and the scaling alone."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import triton
import triton.language as tl

from .decoding import rounded


@triton.jit
def scaled(
    total, m, n, m_there, n_there, row_scale, scale, bias, sums, zero, each, factor, number, ADDED: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Return (total + sums * (number - zero)) * row_scale * (scale * factor) + bias, float32, rounding after each step.

    total: int32 [m, n]. scale, zero: one for `each` rows of the weight, in any dtype. ADDED: "" for no sums, "number"
    for no zeros, or "each". Without SCALED all scales are `factor`.
    """
    if ADDED == "number":
        total += (tl.load(sums + m, mask=m_there, other=0) * number)[:, None]
    if ADDED == "each":
        added = number - tl.load(zero + n // each, mask=n_there, other=0).to(tl.int32)
        total += tl.load(sums + m, mask=m_there, other=0)[:, None] * added[None, :]
    if SCALED:
        of_column = tl.load(scale + n // each, mask=n_there, other=0.0).to(tl.float32) * factor
    else:
        of_column = tl.where(n_there, 1.0, 0.0) * factor
    y = total.to(tl.float32) * tl.load(row_scale + m, mask=m_there, other=0.0)[:, None] * of_column[None, :]
    if BIASED:
        y = y + tl.load(bias + n, mask=n_there, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def finish_kernel(
    product, out, row_scale, scale, bias, sums, zero, rows, columns, out_columns, each, factor, number,
    BIASED: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr, OUT: tl.constexpr, BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scale product [rows, columns], int32; see `scaled`. Rows of `out` are `out_columns` apart."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_there, n_there = m < rows, n < columns
    live = m_there[:, None] & n_there[None, :]
    v = tl.load(product + m[:, None].to(tl.int64) * columns + n[None, :], mask=live, other=0)
    y = scaled(
        v, m, n, m_there, n_there, row_scale, scale, bias, sums, zero, each, factor, number, ADDED, SCALED, BIASED
    )
    at = m[:, None].to(tl.int64) * out_columns + n[None, :]
    tl.store(out + at, rounded(y, OUT, BITS).to(out.dtype.element_ty), mask=live)


@triton.jit
def tile_of(program, tall, wide, BAND: tl.constexpr):
    """Return the row and the column of a program's tile among [tall, wide]: bands of BAND rows, column by column, so
    that programs that run at the same time share tiles of both sides in the cache."""
    band = program // (BAND * wide)
    high = tl.minimum(tall - band * BAND, BAND)
    within = program - band * BAND * wide
    return band * BAND + within % high, within // high


@triton.jit
def product_kernel(
    x, weight, out, row_scale, scale, bias, sums, zero, m_rows, rows, columns, out_columns, each, factor, number,
    BIASED: tl.constexpr, ADDED: tl.constexpr, SCALED: tl.constexpr, UNSIGNED: tl.constexpr, WHOLE: tl.constexpr,
    OUT: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    """Multiply x [m_rows, columns] by the transposed weight [rows, columns], 8-bit codes, and scale; see `scaled`.

    Rows of `out` are `out_columns` apart. WHOLE: `columns` is a multiple of BLOCK_K. UNSIGNED: codes of the weight are
    uint8, and are multiplied as those of int8 that are less by 128. Tensor cores of an H100 take one side from
    registers, where codes can be changed, and it must be the left one: the product is computed transposed then.
    """
    tall, wide = tl.cdiv(m_rows, BLOCK_M), tl.cdiv(rows, BLOCK_N)
    i, j = tile_of(tl.program_id(0), tall, wide, BAND)
    m = i * BLOCK_M + tl.arange(0, BLOCK_M)
    n = j * BLOCK_N + tl.arange(0, BLOCK_N)
    m_there, n_there = m < m_rows, n < rows
    k = tl.arange(0, BLOCK_K)
    # Beyond the end the last row is read once more, which needs no mask in the loop; its results are not stored.
    x_row = x + tl.minimum(m, m_rows - 1).to(tl.int64) * columns
    w_row = weight + tl.minimum(n, rows - 1).to(tl.int64) * columns
    if UNSIGNED:
        left_at, right_at = w_row[:, None] + k[None, :], x_row[None, :] + k[:, None]
        total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32)
    else:
        left_at, right_at = x_row[:, None] + k[None, :], w_row[None, :] + k[:, None]
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
    for first in range(0, columns, BLOCK_K):
        if WHOLE:
            left, right = tl.load(left_at + first), tl.load(right_at + first)
        else:
            live = k < columns - first
            left = tl.load(left_at + first, mask=live[None, :], other=0)
            right = tl.load(right_at + first, mask=live[:, None], other=0)
        if UNSIGNED:
            left = (left ^ 0x80).to(tl.int8, bitcast=True)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    if UNSIGNED:
        total = tl.trans(total)
    y = scaled(
        total, m, n, m_there, n_there, row_scale, scale, bias, sums, zero, each, factor, number, ADDED, SCALED, BIASED
    )
    at = m[:, None].to(tl.int64) * out_columns + n[None, :]
    tl.store(out + at, rounded(y, OUT, BITS).to(out.dtype.element_ty), mask=m_there[:, None] & n_there[None, :])


@triton.jit
def runs_kernel(
    x, weight, scale, row_scale, bias, out, m_rows, rows, columns, out_columns, groups, each, taps, factor,
    BIASED: tl.constexpr, OUT: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BAND: tl.constexpr, SPREAD: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """Compute out = (sum over runs of float32(x * weight) * (scale * factor)) * row_scale + bias, rounding after each
    step, for weights with several scales per row, each for a run of columns.

    cuBLAS would need one GEMM for each run, and as many passes over the results. Here the sums of a run stay in
    registers. All runs are one loop, so that the next columns are on their way when a run ends, too.

    x, weight: int8 [m_rows, columns] and [rows, columns], columns being [groups, each, taps]; a run is the `each` of
    one group and tap, a multiple of BLOCK_K. scale: [rows, groups, taps], in any dtype. SPREAD: there are several taps.
    BOTH: row_scale is [m_rows, groups], of runs, and multiplies their sums before `scale` does. Rows of `out` are
    `out_columns` apart.
    """
    i, j = tile_of(tl.program_id(0), tl.cdiv(m_rows, BLOCK_M), tl.cdiv(rows, BLOCK_N), BAND)
    m = i * BLOCK_M + tl.arange(0, BLOCK_M)
    n = j * BLOCK_N + tl.arange(0, BLOCK_N)
    m_there, n_there = m < m_rows, n < rows
    lane = tl.arange(0, BLOCK_K)
    if SPREAD:
        lane = lane * taps
    # Beyond the end the last row is read once more, as in `product_kernel`.
    x_at = x + tl.minimum(m, m_rows - 1).to(tl.int64)[:, None] * columns + lane[None, :]
    w_row = tl.minimum(n, rows - 1)
    w_at = weight + w_row.to(tl.int64)[None, :] * columns + lane[:, None]
    s_at = scale + w_row * (groups * taps)
    steps = each // BLOCK_K
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
    for step in range(taps * groups * steps):
        run = step // steps
        within = step - run * steps
        if SPREAD:
            tap = run // groups
            group = run - tap * groups
            k, one = (group * each + within * BLOCK_K) * taps + tap, group * taps + tap
        else:
            k, one = step * BLOCK_K, run
        a, b = tl.load(x_at + k), tl.load(w_at + k)
        s = tl.load(s_at + one)  # of every step: it arrives while the codes are multiplied
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
        if within == steps - 1:
            part = sums.to(tl.float32)
            if BOTH:
                part = part * tl.load(row_scale + tl.minimum(m, m_rows - 1) * groups + run)[:, None]
            total += part * (s.to(tl.float32) * factor)[None, :]
            sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
    y = total
    if not BOTH:
        y = y * tl.load(row_scale + m, mask=m_there, other=0.0)[:, None]
    if BIASED:
        y = y + tl.load(bias + n, mask=n_there, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * out_columns + n[None, :]
    tl.store(out + at, rounded(y, OUT, BITS).to(out.dtype.element_ty), mask=m_there[:, None] & n_there[None, :])

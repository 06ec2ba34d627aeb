"""GEMM of 8-bit codes for weights with several scales per row, each for a run of columns: device code.

cuBLAS would need one GEMM for each run, and as many passes over the results. Here the sums of a run stay in registers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import triton
import triton.language as tl

from .decoding import rounded


@triton.jit
def runs_kernel(
    x, weight, scale, row_scale, bias, out, m_rows, rows, columns, out_columns, groups, each, taps,
    BIASED: tl.constexpr, OUT: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out = (sum over runs of float32(x * weight) * scale) * row_scale + bias, rounding after each step.

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

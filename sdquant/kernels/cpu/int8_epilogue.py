"""Prologue and epilogue of an integer GEMM, in one pass each: quantize activations and weights, and scale the sums.

Bit-equal to what `int8_reference` computes in torch, for finite numbers. Only if `extension()` is available; tensors
are in CPU memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import extension
from .layout_descriptors import TYPES, addresses, describe_layout, is_blocks
from .threads import over_rows

if TYPE_CHECKING:
    from ...core import PackedLayout
    from ..base import Parts


def quantize_rows(x: Tensor, codes: Tensor, scales: Tensor, sums: Tensor) -> None:
    """Quantize x [m, k] of float32, bfloat16 or float16, whose rows are contiguous, to int8 codes [m, k] with the scale
    of each row, float32 [m], and the sum of its codes, int32 [m]; all three contiguous."""
    m, k = x.shape
    quantize = extension().quantize  # type: ignore[union-attr]
    kind, of, stride = TYPES[x.dtype], x.data_ptr(), x.stride(0) * x.element_size()
    to = (codes.data_ptr(), scales.data_ptr(), sums.data_ptr())
    over_rows(m, k, lambda start, stop: quantize(kind, of, stride, start, stop, k, *to))


def recodes(form: PackedLayout, parts: Parts) -> bool:
    """Return whether `recode` can read such a weight."""
    return describe_layout(form, parts) is not None and not (is_blocks(form) and form.columns % form.group)


def recode(form: PackedLayout, parts: Parts, codes: Tensor, scales: Tensor) -> None:
    """Requantize a weight that `recodes` accepts to int8 codes [rows, columns] and row scales, float32 [rows]."""
    run = extension().recode  # type: ignore[union-attr]
    common = (describe_layout(form, parts), *addresses(form, parts))
    to = (codes.data_ptr(), scales.data_ptr())

    def some(start: int, stop: int) -> None:
        row = codes.new_empty(form.columns, dtype=torch.float32)
        run(*common, start, stop, row.data_ptr(), *to)

    over_rows(form.rows, form.columns, some)


def finish(
    totals: Tensor, sums: Tensor, added: Tensor | None, scales: Tensor, weight_scales: Tensor, bias: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    """Write (totals + sums * added) * scales * weight_scales + bias to `out` [m, n], whose rows are contiguous.

    Args:
        totals: int32 [m, n]. sums: int32 [m], of the activations' codes. added: int32 [n], or None for 0.
        scales, weight_scales: float32 [m] and [n]. bias: [n] of any float dtype, or None.
    """
    m, n = totals.shape
    run = extension().finish  # type: ignore[union-attr]
    wide = None if bias is None else bias.float().contiguous()
    of = (sums.data_ptr(), 0 if added is None else added.data_ptr(), scales.data_ptr(), weight_scales.data_ptr())
    to = (0 if wide is None else wide.data_ptr(), TYPES[out.dtype], out.data_ptr(), out.stride(0) * out.element_size())
    over_rows(m, n, lambda start, stop: run(totals.data_ptr(), start, stop, n, *of, *to))

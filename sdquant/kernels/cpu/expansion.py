"""Codes of few bits to 8-bit integers in the C extension: see expand.h."""

from __future__ import annotations

import torch
from torch import Tensor

from . import extension
from .int8_gemm import packed_numbers
from .threads import over_rows


def expand_rows(
    codes: Tensor, bits: int, scale: Tensor, values: Tensor | None, table: Tensor | None, out: Tensor
) -> bool:
    """Write the integers that rows of codes stand for into `out`; return whether these kernels can.

    Args:
        codes: uint8 [rows, bytes], of 4 or 6 bits as backends/_comfy_w4a8.py has them.
        scale: of groups of columns, [rows, groups], float32, or uint8, the indices of `values`, float32 [256].
        table: the value of each code of 4 bits, float32 [16] or [rows, 16]; a code of 6 bits is itself less 32.
        out: int8 [rows, columns].
    """
    module = extension()
    parts = [part for part in (codes, scale, table, out) if part is not None]
    if module is None or not all(part.is_cpu and part.is_contiguous() for part in parts):
        return False
    rows, groups = scale.shape
    group, apart = out.shape[1] // groups, table.shape[1] if table is not None and table.ndim == 2 else 0
    of_bytes, of_table = (0 if each is None else each.data_ptr() for each in (values, table))
    of = codes.data_ptr(), codes.shape[1], bits, scale.data_ptr(), of_bytes, of_table, apart, groups, group

    def some(start: int, stop: int) -> None:
        spare = torch.empty(groups, dtype=torch.float32, device=codes.device)
        module.expand(packed_numbers((*of, start, stop, spare.data_ptr(), out.data_ptr())))

    over_rows(rows, out.shape[1], some)
    return True

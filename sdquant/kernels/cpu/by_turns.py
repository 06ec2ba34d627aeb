"""Codes whose scales go by turns, decoded in the C extension: see by_turns.h."""

from __future__ import annotations

import torch
from torch import Tensor

from . import extension
from .int8_gemm import packed_numbers
from .layout_descriptors import TYPES
from .threads import over_rows


def decode_by_turns(codes: Tensor, bits: int, middle: int, scale: Tensor, shift: Tensor | None, out: Tensor) -> bool:
    """Write (code - middle) * scale - shift into `out`; return whether these kernels can.

    Args:
        codes: uint8 [runs, width], or of 4 bits [runs, width / 2], the even column in the low half.
        scale, shift: float32 [1, width]. out: [runs, width], of float32, bfloat16 or float16.
    """
    module = extension()
    parts = [part for part in (codes, scale, shift, out) if part is not None]
    if module is None or bits not in (4, 8) or out.dtype not in TYPES:
        return False
    if not all(part.is_cpu and part.is_contiguous() for part in parts):
        return False
    if any(part is not None and part.dtype != torch.float32 for part in (scale, shift)):
        return False
    (runs, width), less = out.shape, 0 if shift is None else shift.data_ptr()
    of = codes.data_ptr(), codes.shape[1], bits, middle, scale.data_ptr(), less, width
    to, step, kind = out.data_ptr(), width * out.element_size(), TYPES[out.dtype]

    def some(start: int, stop: int) -> None:
        module.by_turns(packed_numbers((*of, to, step, start, stop, kind)))

    over_rows(runs, width, some)
    return True

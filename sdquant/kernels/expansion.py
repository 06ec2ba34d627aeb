"""Codes of few bits to the 8-bit integers that they stand for, by the kernels that can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..core import code_tables
from .cpu import expansion as native
from .dispatch_guard import plain
from .triton import imports

if TYPE_CHECKING:
    from torch import Tensor


def expand_rows(
    codes: Tensor, bits: int, scale: Tensor, table: Tensor | None, out: Tensor, channel: Tensor | None = None
) -> bool:
    """Write round(value * scale), at most 127 in magnitude, into `out`; return whether there are kernels for it.

    Args:
        codes: uint8 [rows, bytes], of 4 or 6 bits as backends/_comfy_w4a8.py has them.
        scale: of groups of columns, float32 or float8_e4m3fn [rows, groups].
        table: the value of each code of 4 bits, float32 [16] or [rows, 16]; a code of 6 bits is itself less 32.
        out: int8 [rows, columns]; of floats with `channel`.
        channel: float32 [rows, 1], what the integers are multiplied by, on a card.
    """
    parts = [part for part in (codes, scale, out, table, channel) if part is not None]
    if not all(plain(part) and part.device == out.device and part.is_contiguous() for part in parts):
        return False
    if out.is_cpu and channel is None:
        values = None
        if scale.dtype != torch.float32:
            values = code_tables.float8_values(scale.dtype, torch.float32, scale.device)
            scale = scale.view(torch.uint8)
        return native.expand_rows(codes, bits, scale, values, table, out)
    kernels = imports.expansion(out.device)
    if kernels is None or codes.storage_offset() % 4 or codes.shape[1] % 4:  # rows are read by words
        return False
    kernels.expansion(codes, bits, scale, table, out, channel)(out.device)
    return True

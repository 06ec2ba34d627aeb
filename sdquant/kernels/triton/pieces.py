"""In which pieces a weight is dequantized and multiplied, so that each is still in a card's cache when it is read."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import torch

from .launch import ALIGNED_ROWS

if TYPE_CHECKING:
    from ...core import PackedLayout

# Each piece is two launches more, which cost the processor some 15 us.
_MOST = 8


def pieces_of(form: PackedLayout, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many rows of a weight that is dequantized to `dtype` fill half of a card's cache; 0 for no pieces, if
    all fit or if there would be too many."""
    room, columns = _cache_bytes(device) // 2, form.columns
    count = math.ceil(form.rows * columns * dtype.itemsize / room) if room else 0
    if not 1 < count <= _MOST or columns % 32:
        return 0
    rows = math.ceil(form.rows / count / ALIGNED_ROWS) * ALIGNED_ROWS
    return rows if rows < form.rows else 0


@cache
def _cache_bytes(device: torch.device) -> int:
    """Return the bytes of a card's second level of cache; 0 where torch does not know."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))

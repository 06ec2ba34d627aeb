"""When products in 8-bit integers on a CPU may be torch's own, between our steps before and after them, and not ours.

Both give the same bits. Which is faster depends on the processor, on the sizes and on torch's version: `fastest` finds
out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import int8_reference, int_matmul
from .base import Coding
from .fastest import is_settled

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ..core import Packed, PackedLayout

# Sums, of 4 bytes each, or weights, that are in the workspace at a time: torch's product wants large pieces.
TILE = 1 << 24
_LEAST = 17  # rows, below which ours reads the weight no more than once
_CPU = torch.device("cpu")


def may_be_torchs(packed: Packed, form: PackedLayout, rows: int, dtype: torch.dtype) -> bool:
    """Return whether torch can compute a product with `rows` rows of activations, and could be faster."""
    of = int8_reference.coding(packed, form)
    return rows >= _LEAST and not of & Coding.BY_RUN and int_matmul.fast(_CPU) and int8_reference.steps_in_c(dtype)


def kind(packed: Packed, form: PackedLayout, dtype: torch.dtype) -> Hashable:
    """Return what the choice depends on."""
    zero = bool(form.zero) if isinstance(form.zero, int) else form.zero_packing
    of = int(int8_reference.coding(packed, form))
    return "int8", form.columns, form.rows, form.packing, zero, form.group < form.columns, of, str(dtype)


def left(packed: Packed, form: PackedLayout, dtype: torch.dtype) -> Callable[[int], bool] | None:
    """Return whether a prepared product of ours with so many rows is left to torch, or to finding out; None: never."""
    if not may_be_torchs(packed, form, _LEAST, dtype):
        return None
    of = kind(packed, form, dtype)

    def leave(rows: int) -> bool:
        return rows >= _LEAST and not is_settled(of, rows, _CPU)

    return leave

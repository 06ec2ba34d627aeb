"""GGUF block types as the C extension needs them described."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ...core import ggml_iq
from ...core.gguf_types import TYPES

if TYPE_CHECKING:
    from ...core.packed_layout import PackedLayout


def is_blocks(form: PackedLayout) -> bool:
    """Return whether the codes are blocks of ggml's layout."""
    return form.packing in TYPES


def grid(form: PackedLayout) -> int:
    """Return the address of the type's int8 codebook, whose rows its codes select; 0 if it has none."""
    return ggml_iq.grid(form.packing).data_ptr() if form.packing in ggml_iq.GRIDS else 0


@cache  # at every call of a small layer
def by_block(form: PackedLayout) -> PackedLayout:
    """Return the same layout with one row per block, if rows are not whole blocks (SDXL's 320 inputs in blocks of 256):
    threads split the work by rows, and decoders begin and end with a block."""
    if form.columns % form.group == 0:
        return form
    return replace(form, rows=form.rows * form.columns // form.group, columns=form.group)

"""What the extension has to be told about GGUF's block types."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ...core import ggml_iq
from ...core.gguf_types import TYPES

if TYPE_CHECKING:
    from ...core.packed_layout import Form


def is_blocks(form: Form) -> bool:
    """Whether the codes are blocks of ggml's layout."""
    return form.packing in TYPES


def grid(form: Form) -> int:
    """Address of the table of small weights that the type's codes are rows of: int8; 0 where it has none."""
    return ggml_iq.grid(form.packing).data_ptr() if form.packing in ggml_iq.GRIDS else 0


@cache  # at every call of a small layer
def by_block(form: Form) -> Form:
    """The same weight with a row for each block, where rows are not whole blocks (SDXL's 320 inputs in blocks of 256):
    rows are what threads share, and decoders begin and end with a block."""
    if form.columns % form.group == 0:
        return form
    return replace(form, rows=form.rows * form.columns // form.group, columns=form.group)

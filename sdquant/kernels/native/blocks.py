"""What the extension has to be told about GGUF's block types."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...backends import _gguf_iq
from ...formats.gguf_types import TYPES
from . import isa

if TYPE_CHECKING:
    from ..forms import Form

_ALL = 1 << 30
# Up to how many rows a product is faster than decoding into scratch and torch's own, by instruction set. Measured
# (bench/gguf_linear.py): bfloat16 is even at about 100 rows. In float32 the product takes 0.5 to 0.7 of torch's at any
# number of rows on an AMD CPU; 512 is where there would be little to lose if a library were at the CPU's limit.
_FEW = {
    "avx512bf16": {torch.bfloat16: 96, torch.float32: 512, torch.float16: 96},
    "avx2": {torch.bfloat16: 16, torch.float32: 16},
}


def few_of_blocks(form: Form, dtype: torch.dtype) -> int:
    """See `Reader.few`. Only rows of whole blocks can be multiplied."""
    few = 0 if form.columns % form.group else _FEW.get(isa() or "", {}).get(dtype, 0)
    # Without instructions for float16 torch's product takes 5 times as long as this one.
    return _ALL if few and dtype == torch.float16 and not _halves() else few


def _halves() -> bool:
    """Whether torch multiplies float16 by instructions for it."""
    return bool(torch.backends.mkldnn.is_available()) and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())  # type: ignore[no-untyped-call]


def is_blocks(form: Form) -> bool:
    """Whether the codes are blocks of ggml's layout."""
    return form.packing in TYPES


def grid(form: Form) -> int:
    """Address of the table of small weights that the type's codes are rows of: int8; 0 where it has none."""
    return _gguf_iq.grid(form.packing).data_ptr() if form.packing in _gguf_iq.GRIDS else 0


def by_block(form: Form) -> Form:
    """The same weight with a row for each block, where rows are not whole blocks (SDXL's 320 inputs in blocks of 256):
    rows are what threads share, and decoders begin and end with a block."""
    if form.columns % form.group == 0:
        return form
    return replace(form, rows=form.rows * form.columns // form.group, columns=form.group)

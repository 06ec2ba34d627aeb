"""Blocks of GGUF's types for tests of what reads them."""

from __future__ import annotations

import torch

from sdquant.backends._gguf_blocks import sound
from sdquant.core.gguf_types import TYPES
from sdquant.core.packed_layout import PackedLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((24, 512), (7, 768), (64, 320))  # rows of whole blocks, an odd number of rows, blocks across rows


def random_blocks(kind: str, count: int) -> torch.Tensor:
    """Any codes, so that all paths run; scales of all sizes that float16 has, subnormal and negative ones included, but
    small enough that no weight is beyond it."""
    made = torch.Generator().manual_seed(TYPES[kind].id)
    blocks = torch.randint(0, 256, (count, TYPES[kind].nbytes), dtype=torch.uint8, generator=made)
    for at in TYPES[kind].halves:
        sizes = 10 ** (torch.rand(count, generator=made) * 7 - 8)
        scales = (torch.randn(count, generator=made) * sizes).half()
        blocks[:, at : at + 2] = scales[:, None].view(torch.uint8)
    if kind == "mxfp4":
        blocks[:, 0] %= 140  # powers of two from the smallest subnormal float32 on
    if kind == "nvfp4":
        blocks[:, :4] %= 0x7F
    if kind == "iq1_m":
        blocks[:, 55] &= 0x2F  # the upper bits of the float16 that is spread over four numbers
    assert sound(kind, blocks)
    return blocks


def form_of(kind: str, rows: int, columns: int) -> PackedLayout:
    return PackedLayout(rows=rows, columns=columns, codes="blocks", packing=kind, group=TYPES[kind].block)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """So that zeros of either sign differ."""
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)

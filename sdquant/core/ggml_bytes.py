"""Read multi-byte numbers from raw GGUF blocks, uint8 [n, bytes per block]."""

from __future__ import annotations

import torch
from torch import Tensor


def contiguous(part: Tensor) -> Tensor:
    """Copy to aligned memory, which a view as a wider dtype needs; `contiguous` would not copy a single row."""
    return part.clone(memory_format=torch.contiguous_format)


def half(blocks: Tensor, at: int) -> Tensor:
    """Read the fp16 number at byte `at` of each block: float32 [n, 1]."""
    return contiguous(blocks[:, at : at + 2]).view(torch.float16).float()

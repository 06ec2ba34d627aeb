"""Numbers of more than a byte out of raw GGUF blocks, [n, bytes per block] uint8."""

from __future__ import annotations

import torch
from torch import Tensor


def copied(part: Tensor) -> Tensor:
    """In aligned memory, which a view as wider numbers needs; `contiguous` would leave a single row where it is."""
    return part.clone(memory_format=torch.contiguous_format)


def half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of each block, [n, 1] float32."""
    return copied(blocks[:, at : at + 2]).view(torch.float16).float()

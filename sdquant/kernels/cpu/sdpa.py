"""Attention in C, where the processor multiplies bf16."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import torch

from . import extension, isa
from .threads import over_rows

if TYPE_CHECKING:
    from torch import Tensor

QUERIES = 32  # rows of queries that are worked on together: attention.h
MOST_WIDTH = 256  # of a head: with 512 torch's takes 0.85 of this kernel's time


def reads(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether there is a kernel for such tensors."""
    if isa() not in ("amx", "avx512bf16") or any(type(x) is not torch.Tensor for x in (q, k, v)):
        return False
    return (
        all(x.dtype == torch.bfloat16 and x.is_cpu and x.ndim == 4 and x.stride(3) == 1 for x in (q, k, v))
        and q.shape[:2] == k.shape[:2]
        and k.shape == v.shape
        and q.shape[3] == k.shape[3] <= MOST_WIDTH
        and q.numel() > 0 < k.numel()
    )


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return softmax(q k^T * scale) v in bfloat16 for q [batch, heads, queries, width] and k and v [batch, heads,
    keys, width]. The result has q's shape; in memory it is [batch, queries, heads, width]."""
    batch, heads, queries, width = q.shape
    out = torch.empty(batch, queries, heads, width, dtype=q.dtype, device=q.device).transpose(1, 2)
    numbers = [n for x in (q, k, v, out) for n in (x.data_ptr(), *x.stride()[:3])]
    arguments = struct.pack("20qd", *numbers, heads, queries, k.shape[2], width, scale)
    run, each = extension().attend, math.ceil(queries / QUERIES)  # type: ignore[union-attr]
    work = 2 * QUERIES * k.shape[2] * width
    over_rows(batch * heads * each, work, lambda start, stop: run(arguments + struct.pack("2q", start, stop)), step=1)
    return out

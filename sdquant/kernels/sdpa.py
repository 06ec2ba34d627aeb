"""Attention with `compute="int8"`: torch's, or a faster kernel of the same precision where there is one.

The kernels for processors with AMX, and for those with AVX-512 only, multiply bf16 with sums in float32 and round the
softmax to bf16, as torch's does; their error is that of torch's. With nearly all other products of a step in integers,
torch's attention would take a third of the remaining time, and more than half without AMX.
"""

from __future__ import annotations

import logging
import math
import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .cpu import extension, isa
from .cpu.threads import over_rows
from .dispatch_guard import undisturbed

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


log = logging.getLogger(__name__)


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Compute `scaled_dot_product_attention` for the same arguments; None if torch should do it."""
    tensors = (query, key, value)
    if attn_mask is not None or dropout_p or is_causal or enable_gqa or not reads(*tensors):
        return None
    if torch.is_autocast_enabled("cpu") or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0 or not _sound():  # the kernel takes the largest score before it is scaled
        return None
    return attend(query, key, value, scale)


def _between(low: float, high: float, tokens: int) -> Tensor:
    """Return evenly spaced numbers, float32 [2, 3, tokens, 40]."""
    count = 2 * 3 * tokens * 40
    return torch.linspace(low, high, count, dtype=torch.float32, device="cpu").view(2, 3, tokens, 40)


@cache
@undisturbed
def _sound() -> bool:
    """Return whether the kernel gives correct results on this machine; checked once, before it is used."""
    with torch.no_grad():
        q = _between(-3, 3, 37).sin().bfloat16()
        k = _between(-5, 9, 301).cos().bfloat16()
        v = _between(0, 99, 301).sin().bfloat16()
        result = attend(q, k, v, 0.5).float()
        expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.5)
    good = bool(((result - expected).abs() <= 0.01 * expected.abs() + 0.01).all())
    if not good:
        log.warning("The %s attention kernel is not used: its results are wrong. Using torch's instead.", isa())
    return good


def replacement(func: Any) -> Any | None:
    """Return the function to try before torch's `func`; None if there is none."""
    return attended if func is F.scaled_dot_product_attention else None

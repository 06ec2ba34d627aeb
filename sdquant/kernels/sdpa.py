"""Attention with `compute="int8"`: torch's, or a faster kernel of the same precision where there is one.

The kernels for processors with AMX, and for those with AVX-512 only, multiply bf16 with sums in float32 and round the
softmax to bf16, as torch's does; their error is that of torch's. With nearly all other products of a step in integers,
torch's attention would take a third of the remaining time, and more than half without AMX.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .cpu import isa
from .cpu import sdpa as native
from .self_check import undisturbed

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
    if attn_mask is not None or dropout_p or is_causal or enable_gqa or not native.reads(*tensors):
        return None
    if torch.is_autocast_enabled("cpu") or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if scale <= 0 or not _sound():  # the kernel takes the largest score before it is scaled
        return None
    return native.attend(query, key, value, scale)


@cache
@undisturbed
def _sound() -> bool:
    """Return whether the kernel gives correct results on this machine; checked once, before it is used."""
    with torch.no_grad():
        q = torch.linspace(-3, 3, 2 * 3 * 37 * 40, dtype=torch.float32).sin().view(2, 3, 37, 40).bfloat16()
        k = torch.linspace(-5, 9, 2 * 3 * 301 * 40, dtype=torch.float32).cos().view(2, 3, 301, 40).bfloat16()
        v = torch.linspace(0, 99, 2 * 3 * 301 * 40, dtype=torch.float32).sin().view(2, 3, 301, 40).bfloat16()
        result = native.attend(q, k, v, 0.5).float()
        expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.5)
    good = bool(((result - expected).abs() <= 0.01 * expected.abs() + 0.01).all())
    if not good:
        log.warning("The %s attention kernel is not used: its results are wrong. Using torch's instead.", isa())
    return good


def replacement(func: Any) -> Any | None:
    """Return the function to try before torch's `func`; None if there is none."""
    return attended if func is F.scaled_dot_product_attention else None

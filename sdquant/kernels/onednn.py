"""Capabilities of oneDNN, torch's library for CPUs, on this machine."""

from __future__ import annotations

from functools import cache

import torch

_KNOWN = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


@cache
def multiplies(dtype: torch.dtype) -> bool | None:
    """Return whether oneDNN has products and convolutions of such floats; None if torch does not say."""
    supported = getattr(torch.ops.mkldnn, _KNOWN[dtype], None) if dtype in _KNOWN else None
    return None if supported is None else bool(supported())

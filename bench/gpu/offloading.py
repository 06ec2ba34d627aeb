"""Balanced offload of the same Flux: a step against computing and against copying, and how much of both overlaps."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from typing import Any

import torch

from bench import gpu_offload
from bench.gpu import flux

SHARES = (0.5,)


def measure(device: torch.device, small: bool) -> Iterator[dict[str, Any]]:
    """The rows of `bench.gpu_offload` for bf16 and nf4 with a budget of half the weights."""
    args = argparse.Namespace(**vars(flux.arguments(small)) | {"rounds": 1 if small else 3})
    if small:
        args.double, args.single = 2, 16
    for scheme in (None, "nf4"):
        replace = None if scheme is None else flux.replacement(scheme, None, False)
        with torch.inference_mode():
            yield from gpu_offload.rows(scheme, args, device, replace=replace, shares=SHARES)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

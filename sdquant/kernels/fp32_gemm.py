"""Exact products in float32, also for 16-bit activations, on processors without instructions for those.

torch multiplies bfloat16 there as it can: with AVX2 alone it takes three to four times as long as with the same numbers
in float32 (bench/results/linear-avx2.json). So weights are decoded, rounded to the activations' dtype as ever, and
multiplied as float32; sums are rounded once, at the end. A part of the weight is decoded at a time, so that it stays in
the cache, and a part of the activations widened.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import torch_dtypes
from . import onednn
from .blocked_gemm import Rows, parts
from .cpu import isa

# Weights that are decoded at a time for each thread, in rows of them: 4 MB; and more with more than so many rows of
# activations, which torch lays out anew for each part of the weight.
WEIGHTS, FEW = 1 << 20, 64
ROWS = 1024  # of activations at a time
CONVOLVED = 1 << 22  # weights of a convolution, which looks at all its inputs each time


@cache
def is_profitable(dtype: torch.dtype) -> bool:
    """Return whether this is the fastest exact product on this CPU for activations of `dtype`."""
    if isa() == "avx2":  # with AVX-512 or without, these processors have no instructions for 16-bit floats
        return dtype in torch_dtypes.COMPUTE_DTYPES
    return isa() is None and onednn.multiplies(dtype) is False


def linear(x: Tensor, bias: Tensor | None, rows: int, weight: Rows) -> Tensor:
    """Multiply x [..., columns] by the transposed weight and add the bias [rows]: [..., rows] in x's dtype."""
    columns = x.shape[-1]
    flat = x.reshape(-1, columns)
    out = x.new_empty(len(flat), rows)
    added = None if bias is None else bias.float()
    with _as_they_are():
        for some in range(0, len(flat), ROWS):
            wide = flat[some : some + ROWS].float()
            each = WEIGHTS * torch.get_num_threads() * max(len(wide) // FEW, 1) // columns
            for start, stop in parts(rows, each):
                done = F.linear(wide, weight(start, stop), None if added is None else added[start:stop])
                out[some : some + ROWS, start:stop] = done
    return out.view(*x.shape[:-1], rows)


def convolve(
    x: Tensor, bias: Tensor | None, shape: tuple[int, ...], groups: int, weight: Rows, run: Callable[..., Tensor]
) -> Tensor:
    """Convolve x [b, in, ...] with the weight [*shape] and add the bias: [b, out, ...] in x's dtype.

    Args:
        run: the convolution of an input, a weight (possibly of some of the outputs only), and a bias.
    """
    wide, added = x.float(), None if bias is None else bias.float()
    whole = [(0, shape[0])]  # a part of a grouped weight would be cut into groups anew
    ranges = whole if groups > 1 else list(parts(shape[0], CONVOLVED // math.prod(shape[1:])))
    with _as_they_are():
        done = [
            run(wide, weight(start, stop).view(-1, *shape[1:]), None if added is None else added[start:stop]).to(
                x.dtype
            )
            for start, stop in ranges
        ]
    return done[0] if len(done) == 1 else torch.cat(done, 1)


def _as_they_are() -> AbstractContextManager[object]:
    """Disable autocast, which would make torch multiply in 16 bits after all."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()

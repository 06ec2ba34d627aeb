"""Exact products with a weight that is dequantized a part at a time: each part is multiplied while it is in the cache.

Dequantizing a weight as a whole writes it to memory, from where torch reads it. That costs 15 to 30 % of a product with
77 rows of activations, and next to nothing of one with 1024, where torch's repacking of the activations for each part
costs more (measured on a Zen 4 core, weights of 640 to 12288 rows and columns). Up to 128 rows or more the C kernels'
own product comes first (`cpu_kernels.few_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from .cpu import isa

WEIGHTS = 3 << 19  # that are decoded at a time for each thread: 3 MB
MOST = 192  # rows of activations
CONVOLVED = 1 << 23  # weights of a convolution: 1280 x 1280 x 3 x 3 are more, 640 x 640 x 3 x 3 fewer

Rows = Callable[[int, int], Tensor]  # of start and stop: those rows of the weight, [stop - start, columns]


def most(dtype: torch.dtype) -> int:
    """Return up to how many rows of activations this is faster than dequantizing the whole; 0 if it never is."""
    return MOST if dtype == torch.bfloat16 and isa() == "avx512bf16" else 0


def most_patches(dtype: torch.dtype, weights: int) -> int:
    """Return the same for patches of images and a convolution of so many weights: copying patches takes time, too."""
    return most(dtype) if weights >= CONVOLVED else 0


def linear(x: Tensor, bias: Tensor | None, rows: int, weight: Callable[[int, int], Tensor | None]) -> Tensor | None:
    """Multiply x [m, columns] by the transposed weight and add the bias [rows]: [m, rows]; all of one dtype.

    Args:
        weight: as `Rows`; returns None if it cannot be decoded in parts, and then so does this function.
    """
    spans = list(parts(rows, WEIGHTS * torch.get_num_threads() // x.shape[1]))
    out = x.new_empty(len(x), rows) if len(spans) > 1 else None
    for start, stop in spans:
        some = weight(start, stop)
        if some is None:
            return None
        done = F.linear(x, some, None if bias is None else bias[start:stop])
        if out is None:
            return done
        out[:, start:stop] = done
    return out


def parts(rows: int, each: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each part, of about `each` rows."""
    each = max(32, each // 32 * 32)
    for start in range(0, rows, each):
        yield start, min(start + each, rows)

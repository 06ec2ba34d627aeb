"""Rotations by Hadamard matrices, which spread outliers before a weight or activations are quantized.

Two kinds, by the number of values that are rotated together. Powers of 4 have the regular matrix: Kronecker powers of
one of size 4 whose rows all sum to the same (ConvRot, https://arxiv.org/abs/2512.03673). Other powers of 2 have
Sylvester's. Both are symmetric and, divided by the root of their size, their own inverse.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..utils.device_constants import constant

_REGULAR = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))
_SYLVESTER = ((1, 1), (1, -1))


def group_size(channels: int, most: int = 256) -> int:
    """Return how many of `channels` inputs SDNQ rotates together; 0 if it rotates none.

    It is the smaller of the two numbers, rounded up to a power of 2 and then halved until it divides `channels`.
    """
    size = 1 << max(0, min(channels, most) - 1).bit_length()
    while size > 1 and channels % size:
        size //= 2
    return size if size >= 4 else 0


def is_regular(size: int) -> bool:
    """Return whether a matrix of `size`, a power of 2, is of the regular kind: whether `size` is a power of 4."""
    return size.bit_length() % 2 == 1


@constant
def matrix(size: int, device: torch.device) -> Tensor:
    """Return the orthogonal matrix of `size`, a power of 2: float32 [size, size], of either kind."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"no Hadamard matrix of size {size} is known here: it is not a power of 2")
    step = torch.tensor(_REGULAR if is_regular(size) else _SYLVESTER, dtype=torch.float32, device="cpu")
    signs = torch.ones(1, 1, device="cpu")
    while len(signs) < size:
        signs = torch.kron(signs, step)
    made: Tensor = signs / math.sqrt(size)
    return made.to(device)


def rotate(values: Tensor, size: int) -> Tensor:
    """Rotate each run of `size` values of the last axis; twice gives the values back. Keep shape and dtype."""
    rotation = matrix(size, values.device).to(values.dtype)
    return (values.reshape(-1, size) @ rotation).view(values.shape)

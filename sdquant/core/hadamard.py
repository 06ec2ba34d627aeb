"""Rotations by Hadamard matrices, which spread outliers before a weight or activations are quantized.

Two kinds, by the number of values that are rotated together. Powers of 4 have the regular matrix: Kronecker powers of

    1  1  1 -1
    1  1 -1  1
    1 -1  1  1
   -1  1  1  1

whose rows all sum to the same (ConvRot, https://arxiv.org/abs/2512.03673). Other powers of 2 have Sylvester's. Both are
symmetric and, divided by the root of their size, their own inverse: rotating twice changes nothing, and the gradient of
a rotation is the same rotation. `kernels.hadamard` rotates activations faster.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..utils.autocast import is_autocast_on
from ..utils.device_constants import constant

_REGULAR = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))
_SYLVESTER = ((1, 1), (1, -1))
_MOST = 4096


def group_size(channels: int, most: int = 256) -> int:
    """Return how many of `channels` inputs SDNQ rotates together; 0 if it rotates none.

    It is the smaller of the two numbers, rounded up to a power of 2 and then halved until it divides `channels`.
    """
    size = 1 << max(0, min(channels, most) - 1).bit_length()
    while size > 1 and channels % size:
        size //= 2
    return size if size >= 4 else 0


def is_group(size: object) -> bool:
    """Return whether values can be rotated in groups of this size: powers of 2 from 4 to 4096, beyond which the matrix
    alone would take more memory than a layer."""
    return type(size) is int and 4 <= size <= _MOST and size & (size - 1) == 0


def is_regular(size: object) -> bool:
    """Return whether groups of this size have the regular matrix: powers of 4 from 4."""
    return type(size) is int and is_group(size) and size.bit_length() % 2 == 1


@constant
def matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthogonal matrix of `size`, [size, size], of the kind that `size` has; [[1]] for size 1."""
    if not (size in (1, 2) or is_group(size)):
        raise ValueError(f"no Hadamard matrix of size {size} is known here: it is not a power of 2")
    values = torch.float64 if dtype == torch.float64 else torch.float32
    step = torch.tensor(_REGULAR if is_regular(size) else _SYLVESTER, dtype=values, device="cpu")
    signs = torch.ones(1, 1, dtype=values, device="cpu")
    while len(signs) < size:
        signs = torch.kron(signs, step)
    return (signs / math.sqrt(size)).to(dtype).to(device)


def rotate_by_matrix(values: Tensor, size: int) -> Tensor:
    """Rotate each run of `size` values of the last axis by one product, in the dtype of `values`, in `autocast` too.

    Sums are in the order of comfy-kitchen's and SDNQ's, so that weights are quantized to the same codes.
    """
    kind = values.device.type
    if is_autocast_on(kind):
        with torch.autocast(kind, enabled=False):
            return rotate_by_matrix(values, size)
    return (values.reshape(-1, size) @ matrix(size, values.dtype, values.device)).view(values.shape)

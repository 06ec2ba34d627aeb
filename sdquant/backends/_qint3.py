"""Eight 3-bit codes in three bytes, and back, with a handful of whole-word operations.

The 24 bits are read as a little-endian number that has code k in its bits 3k to 3k + 2. Unpacking spreads that number
over the eight bytes of an int64 by halving: 24 bits into two lanes of 12, four of 6, eight of 3. All of it is
contiguous int64 arithmetic, and the result, seen as bytes, is the codes in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

# (shift, mask of the lanes after it) from 24 bits together to 3 bits a byte.
_STEPS = ((20, 0x00000FFF_00000FFF), (10, 0x003F003F_003F003F), (5, 0x07070707_07070707))
_MASK24 = 0xFFFFFF


def pack3(codes: Tensor) -> Tensor:
    """Pack codes of 0 to 7, uint8 [rows, n] with n a multiple of 8, as uint8 [rows, 3 n / 8]."""
    rows, n = codes.shape
    words = codes.contiguous().view(torch.int64)  # [rows, n / 8]
    for (shift, _), mask in zip(reversed(_STEPS), (_STEPS[1][1], _STEPS[0][1], _MASK24), strict=True):
        words = (words | (words >> shift)) & mask
    return words.view(torch.uint8).view(rows, n // 8, 8)[:, :, :3].reshape(rows, n // 8 * 3)


def unpack3(data: Tensor) -> Tensor:
    """Unpack uint8 [rows, 3 n / 8] to uint8 [rows, n]: the inverse of `pack3`."""
    rows, size = data.shape
    wide = data.new_zeros(rows, size // 3, 8)
    wide[:, :, :3] = data.view(rows, size // 3, 3)
    words = wide.view(torch.int64).view(rows, size // 3)
    for shift, mask in _STEPS:
        words = (words | (words << shift)) & mask
    return words.view(torch.uint8).view(rows, size // 3 * 8)

"""The order of Nunchaku's tensors, that in which its kernels' threads read them, undone.

Every function takes a tensor as it is in a file, of a weight [out, in] (or its whole tiles of 128 outputs), and
returns it row by row. A tile is 128 outputs; in it numbers go by lanes of a warp. Formats: deepcompressor's packer for
`nunchaku`, and those of comfy-kitchen that the golden vectors have beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TILE = 128  # outputs, and what inputs are padded to a multiple of
_DEPTH = 64  # inputs of a step through a tile


def codes(packed: Tensor) -> Tensor:
    """Return int8 [out, in / 2] as uint8 of that shape, the even column in the low half of a byte."""
    tiles = packed.view(torch.uint8).reshape(-1, packed.shape[1] * 2 // _DEPTH, 8, 8, 4, 2, 2, 4)
    return tiles.permute(0, 2, 5, 3, 1, 6, 4, 7).reshape(packed.shape)


def vector(packed: Tensor) -> Tensor:
    """Return what there is one of for each output or input: [n]."""
    return packed.reshape(-1, 8, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(-1)


def scales(packed: Tensor) -> Tensor:
    """Return scales of 64 inputs, [in / 64, out] by their shape, as [out, in / 64]."""
    groups = packed.shape[0]
    return packed.reshape(-1, groups, 8, 4, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, groups)


def small_scales(packed: Tensor) -> Tensor:
    """Return scales of 16 inputs, float8 [in / 16, out] by their shape, as [out, in / 16]."""
    groups = packed.shape[0]
    tiles = packed.view(torch.uint8).reshape(-1, groups // 4, 8, 4, 4, 4)
    return tiles.permute(0, 4, 3, 2, 1, 5).reshape(-1, groups).view(packed.dtype)


def down(packed: Tensor) -> Tensor:
    """Return the lower factor [in, rank]."""
    tiles = packed.reshape(packed.shape[0] // 16, packed.shape[1] // 16, 8, 4, 2, 2, 2)
    return tiles.permute(0, 5, 3, 6, 1, 4, 2).reshape(packed.shape)


def up(packed: Tensor) -> Tensor:
    """Return the upper factor [out, rank]."""
    tiles = packed.reshape(packed.shape[0] // 16, packed.shape[1] // 16, 8, 4, 2, 2, 2)
    return tiles.permute(0, 4, 2, 1, 5, 3, 6).reshape(packed.shape)


def awq_codes(packed: Tensor) -> Tensor:
    """Return AWQ's codes, int32 [out / 4, in / 2] or int16 [out / 4, in], as uint8 [out, in / 2], the even column in
    the low half of a byte."""
    rows = packed.shape[0] * 4
    words = packed.view(torch.uint8).reshape(packed.shape[0], -1, 4, 2, 8, 2)  # of 16 bits: [.., half, word, byte]
    nibbles = torch.stack((words & 15, words >> 4), dim=-1)  # the i-th of word j is column 8 i + j
    columns = nibbles.permute(0, 2, 1, 3, 5, 6, 4).reshape(rows, -1)
    return columns[:, ::2] | columns[:, 1::2] << 4


def without_interleaving(rows: Tensor, chunks: int) -> Tensor:
    """Return rows [n, ...], of which row j * chunks + s is the j-th of chunk s, chunk by chunk."""
    return rows.reshape(-1, chunks, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape) if chunks > 1 else rows


def picked(picks: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the numbers of picked rows, [n]; see `_nunchaku_find.PICKS`."""
    rows = []
    for first, size, step, count in picks:
        starts = first + torch.arange(count, device=device) * step
        rows.append((starts[:, None] + torch.arange(size, device=device)).flatten())
    return torch.cat(rows)

"""Scales of blocks in the order of Blackwell's tensor cores, which `kernels.block_floats.tiled` makes: back from it.

ComfyUI's NVFP4 and MXFP8 have their scales so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ._bnb_codec import bad

if TYPE_CHECKING:
    from torch import Tensor

_ROWS, _COLUMNS = 128, 4  # of a tile


def untiled(key: str, tiles: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return scales that are in the order of tiles in that of the weight: uint8 [*grid].

    Args:
        key: their file key. tiles: of one byte each, of any shape. grid: rows and columns without the padding.

    Raises:
        BadFileError: there are more or fewer.
    """
    import torch

    down, across = math.ceil(grid[0] / _ROWS), math.ceil(grid[1] / _COLUMNS)
    if tiles.numel() != down * _ROWS * across * _COLUMNS:
        raise bad(
            key,
            f"it has {tiles.numel()} scales, but a weight of {grid[0]} x {grid[1]} blocks has "
            f"{down * _ROWS * across * _COLUMNS}, in tiles of {_ROWS} x {_COLUMNS}",
        )
    in_tiles = tiles.contiguous().view(torch.uint8).reshape(down, across, 32, 4, _COLUMNS).permute(0, 3, 2, 1, 4)
    return in_tiles.reshape(down * _ROWS, across * _COLUMNS)[: grid[0], : grid[1]].contiguous()

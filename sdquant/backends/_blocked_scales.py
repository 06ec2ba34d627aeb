"""Scales of blocks in the order of Blackwell's tensor cores: tiles of 128 rows and 4 columns.

Entry (r, c) of a grid with C columns, both padded to whole tiles, lies at

    (r // 128 * (C // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4

("1D block scaling factors layout" of the cuBLAS documentation). ComfyUI's NVFP4 and MXFP8 have their scales so.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ._bnb_codec import bad

if TYPE_CHECKING:
    from torch import Tensor

_ROWS, _COLUMNS = 128, 4  # of a tile


def tiled(grid: Tensor) -> Tensor:
    """Return scales of one byte [rows, columns] in the order of tiles: uint8 [rows, columns], both in whole tiles."""
    import torch

    rows, columns = grid.shape
    down, across = math.ceil(rows / _ROWS), math.ceil(columns / _COLUMNS)
    padded = torch.zeros((down * _ROWS, across * _COLUMNS), dtype=torch.uint8, device=grid.device)
    padded[:rows, :columns] = grid.view(torch.uint8)
    tiles = padded.view(down, 4, 32, across, _COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * _ROWS, across * _COLUMNS)


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

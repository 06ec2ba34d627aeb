"""The scales of float8 weights in files: of the whole weight, of each row, or of blocks of it.

A scale is a float, or its exponent alone (E8M0: 2 to the power of a byte less 127), which stays a byte here.
Blocks are [rows, columns] of the weight: DeepSeek's and transformers' fine-grained fp8 has 128 x 128.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..core import torch_dtypes
from ._bnb_codec import bad, scales

Block = tuple[int, int]

_LEAST = 16  # no format has smaller blocks, but for those of a single row
_USUAL = 128  # both sides of DeepSeek's blocks, of which the last in a row or column may be cut off


def fitted(key: str, scale: Tensor, shape: tuple[int, ...], details: dict[str, Any]) -> tuple[Tensor, Block | None]:
    """Return the scales of a weight of `shape`, and the block size; None for scales of the whole weight or its rows.

    Args:
        key: the file key of `scale`. details: the weight's metadata in the file.

    Returns:
        float32, or uint8 of exponents: [1 or rows, 1...], or [rows of blocks, columns of blocks].

    Raises:
        BadFileError: it is of a dtype or shape that no known format has.
    """
    exponents = scale.dtype == torch_dtypes.E8M0 or details.get("scale") == "e8m0"
    scale = _exponents(key, scale.view(torch.uint8)) if exponents else scales(key, scale)
    ones, file_block = (1,) * (len(shape) - 1), details.get("block")
    if file_block is not None and not _is_block(file_block):
        raise bad(key, f"its block size is declared as {file_block!r}, but must be two positive integers")
    if file_block is not None and len(shape) == 2 and tuple(scale.shape) == grid_shape(shape, file_block):
        return scale, (file_block[0], file_block[1])
    if scale.numel() == 1:
        return scale.reshape(1, *ones), None
    if tuple(scale.shape) in {shape[:1], (shape[0], 1), (shape[0], *ones)}:
        return scale.reshape(shape[0], *ones), None
    # [rows, groups, 1] of groups of columns; [rows, 1, columns, 1] of blocks, as ModelOpt exports them
    is_flat = scale.ndim == 4 and scale.shape[1] == scale.shape[3] == 1
    grid = scale.squeeze(-1) if scale.ndim == 3 else scale[:, 0, :, 0] if is_flat else scale
    block = _block(tuple(grid.shape), shape) if file_block is None else None
    if block is None:
        raise bad(
            key,
            f"it has shape {list(scale.shape)}, but sdquant only knows scales of the whole weight, its {shape[0]} "
            "rows, or blocks whose sides are powers of two from 16",
        )
    return grid.contiguous(), block


def factors(scale: Tensor) -> Tensor:
    """Return the scales as float32 factors. The exponent 0 stands for 0, as in comfy-kitchen: only blocks of zeros have
    it."""
    return (scale.int() << 23).view(torch.float32) if scale.dtype == torch.uint8 else scale


def rows_of_scales(scale: Tensor, rows: slice, block: Block, columns: int) -> Tensor:
    """Return the factor of each weight in some rows: float32 [rows, columns]."""
    index = torch.arange(rows.start, rows.stop, device=scale.device) // block[0]
    return factors(scale.index_select(0, index)).repeat_interleave(block[1], 1)[:, :columns]


def grid_shape(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """Return the number of blocks of a weight of `shape` [rows, columns] along each dimension."""
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def _block(grid: tuple[int, ...], shape: tuple[int, ...]) -> Block | None:
    """Infer the block size from a grid of scales if the file does not give it: the usual one, else one that divides the
    weight; None if there is none."""
    if len(shape) != 2 or len(grid) != 2 or 0 in grid:
        return None
    if grid == grid_shape(shape, (_USUAL, _USUAL)):
        return _USUAL, _USUAL
    sizes = [one // many for one, many in zip(shape, grid, strict=True) if one % many == 0]
    if len(sizes) < 2 or any(size & (size - 1) for size in sizes) or sizes[1] < _LEAST or 1 < sizes[0] < _LEAST:
        return None
    return sizes[0], sizes[1]


def _is_block(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    )


def _exponents(key: str, scale: Tensor) -> Tensor:
    if bool((scale == 255).any()):
        raise bad(key, "a scale is not a number")
    return scale

"""Some rows of a packed weight, where its backend says that it is packed row by row (`Backend.by_row`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .backends.base import Packed

Range = tuple[int, int]  # first row, and the one after the last


def take(packed: Packed, index: Tensor) -> Packed:
    """The packed form of rows `index`, [n] of int64."""
    return _of_rows(packed, len(index), lambda part: part.index_select(0, index))


def cut(packed: Packed, ranges: Sequence[Range]) -> Packed:
    """The packed form of ranges of rows, one after another. A single range shares the memory of the whole."""
    count = sum(end - begin for begin, end in ranges)
    return _of_rows(packed, count, lambda part: pieces(part, ranges))


def pieces(tensor: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Ranges of a tensor's rows, one after another; a view where there is one range."""
    if len(ranges) == 1:
        return tensor[slice(*ranges[0])]
    return torch.cat([tensor[begin:end] for begin, end in ranges])


def _of_rows(packed: Packed, count: int, select: Callable[[Tensor], Tensor]) -> Packed:
    rows = packed.spec.shape[0]

    def chosen(part: Tensor) -> Tensor:
        if part.numel() == 1 and rows > 1:  # one scale for all
            return part
        raw = part.contiguous().view(rows, -1).view(torch.uint8)  # not all float8 types can be indexed
        return select(raw).view(part.dtype).view(part.shape[0] * count // rows, *part.shape[1:])

    return Packed(
        spec=replace(packed.spec, shape=(count, *packed.spec.shape[1:])),
        parts={name: chosen(part) for name, part in packed.parts.items()},
    )

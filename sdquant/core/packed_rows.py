"""Slice and join rows of packed weights, if their backend packs them row by row (`Backend.by_row`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..utils.buffers import dense
from .backend import Packed

Range = tuple[int, int]  # first row, and the one after the last


def take(packed: Packed, index: Tensor) -> Packed:
    """Return the packed form of the rows in `index`, int64 [n]."""
    return _of_rows(packed, len(index), lambda part: part.index_select(0, index))


def cut(packed: Packed, ranges: Sequence[Range]) -> Packed:
    """Return the packed form of row ranges, concatenated. A single range shares memory with the whole weight if every
    part is row-major."""
    count = sum(end - begin for begin, end in ranges)
    return _of_rows(packed, count, lambda part: pieces(part, ranges))


def join(packs: Sequence[Packed]) -> Packed | None:
    """Concatenate packed weights along the output dimension; None if their parts cannot simply be concatenated."""
    if len(packs) == 1:
        return packs[0]
    backend = packs[0].spec.scheme.codec
    loose = [backend.cuttable(packed) for packed in packs]
    first = loose[0]
    alike = all(replace(packed.spec, shape=first.spec.shape) == first.spec for packed in loose)
    widths = {packed.spec.shape[1:] for packed in loose}
    if not alike or len(widths) > 1 or not all(backend.by_row(packed) for packed in loose):
        return None
    if any(packed.parts.keys() != first.parts.keys() for packed in loose):
        return None
    none = backend.rows_by(first, lambda part: part.new_empty(0))
    whole = {name for name, part in none.items() if part is first.parts[name]}  # which all rows share
    parts: dict[str, Tensor] = {}
    for name in first.parts:
        tensors = [packed.parts[name] for packed in loose]
        if name in whole or any(_for_all(t, p.spec.shape[0]) for t, p in zip(tensors, loose, strict=True)):
            if not all(torch.equal(tensor, tensors[0]) for tensor in tensors):
                return None
            parts[name] = tensors[0]
        else:
            rows = [dense(tensor).view(torch.uint8) for tensor in tensors]
            parts[name] = torch.cat(rows).view(tensors[0].dtype)
    count = sum(packed.spec.shape[0] for packed in loose)
    return Packed(spec=replace(first.spec, shape=(count, *first.spec.shape[1:])), parts=parts)


def decode_rows(packed: Packed, at_once: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the first row and the values, float32 [n, columns], of all rows, about `at_once` weights at a time.

    All are dequantized at once where the backend does not pack them row by row. The caller may change them.
    """
    codec, rows, columns = packed.spec.scheme.codec, packed.spec.shape[0], math.prod(packed.spec.shape[1:])
    step = max(1, at_once // columns)
    whole = None if codec.by_row(packed) else codec.decode(packed, torch.float32).reshape(rows, columns)
    for start in range(0, rows, step):
        if whole is not None:
            yield start, whole[start : start + step]
        else:
            some = cut(packed, [(start, min(start + step, rows))])
            yield start, codec.decode(some, torch.float32).reshape(-1, columns)


def pieces(tensor: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Concatenate row ranges of a tensor; a view if there is only one range."""
    if len(ranges) == 1:
        return tensor[slice(*ranges[0])]
    return torch.cat([tensor[begin:end] for begin, end in ranges])


def _for_all(part: Tensor, rows: int) -> bool:
    """Return whether a part is a scalar for all rows. For a weight with one row, quanto's scale has no dimensions."""
    return part.ndim == 0 or part.numel() == 1 < rows


def _of_rows(packed: Packed, count: int, select: Callable[[Tensor], Tensor]) -> Packed:
    rows = packed.spec.shape[0]

    def chosen(part: Tensor) -> Tensor:
        if _for_all(part, rows):
            return part
        raw = dense(part.contiguous().view(rows, -1)).view(torch.uint8)  # not all float8 types can be indexed
        return select(raw).view(part.dtype).view(part.shape[0] * count // rows, *part.shape[1:])

    return Packed(
        spec=replace(packed.spec, shape=(count, *packed.spec.shape[1:])),
        parts=packed.spec.scheme.codec.rows_by(packed, chosen),
    )

"""Dequantize SDNQ's weights in the order and dtypes of its own dequantizer, in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..core import hadamard
from ._sdnq_numbers import numbers
from ._sdnq_storage import Storage, group_shape, split_shape, storage_of, stored_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ..core import Packed
    from ._sdnq_codes import Code


def decode_into(packed: Packed, out: Tensor, chunk: int) -> None:
    """Dequantize into `out`: in the scale's dtype, then the SVD, then the rotation in float32, then the cast.

    Args:
        chunk: number of weights at a time.
    """
    way, shape, parts = storage_of(packed.spec.scheme.name, packed.spec.details), packed.spec.shape, packed.parts
    scale = _scales(parts, way, way.scales, shape, way.levels, ("scale", "scale_2", "scale_zero_point"))
    zero_point = None
    if way.zero_point:
        zero_point = _scales(parts, way, way.zeros, shape, 1, ("zero_point", "zero_point_scale", "zero_point_2"))
    row, (split, axis) = math.prod(shape[1:]), split_shape(tuple(scale.shape), shape, way)
    up = parts.get("svd_up")
    # Chunks of 16 rows, so that they begin at whole units. With SVD one chunk: a product of slices may round apart.
    step = shape[0] if up is not None else max(16, chunk // max(1, row) // 16 * 16)
    for start in range(0, shape[0], step):
        rows = slice(start, min(start + step, shape[0]))
        values = _values(parts["weight"], way, rows, row, split[1:], axis, scale, zero_point)
        values = values.view(-1, *shape[1:])
        if up is not None:
            down = parts["svd_down"]
            if len(shape) == 2:
                values = values.to(up.dtype).addmm_(up, down)
            else:
                values.add_(torch.mm(up, down).view(shape))
        if way.hadamard:
            values = hadamard.rotate_by_matrix(values.reshape(-1, row).float(), way.hadamard).view(values.shape)
        out[rows].copy_(values)


def _values(
    stored: Tensor,
    way: Storage,
    rows: slice,
    row: int,
    split: tuple[int, ...],
    axis: int,
    scale: Tensor,
    zero_point: Tensor | None,
) -> Tensor:
    """Return the weights of some rows, [rows, *split], in the dtype of the scales. `axis`: that of split
    weights along which a scale is shared."""
    own = _of_rows(scale, rows, axis)
    if way.codebook:
        codes = numbers(stored, way.code, rows, row, torch.int64).view(-1, *split)
        if own.ndim == 1:
            return own[codes]
        return own.expand(*codes.shape[:axis], -1, *codes.shape[axis + 1 :]).gather(axis, codes)
    values = numbers(stored, way.code, rows, row, scale.dtype).view(-1, *split)
    if zero_point is None:
        return values.mul_(own)
    return torch.addcmul(_of_rows(zero_point, rows, axis), values, own)


def _of_rows(scale: Tensor, rows: slice, axis: int) -> Tensor:
    return (
        scale if axis == 0 or scale.shape[0] == 1 or scale.ndim == 1 else scale[rows]
    )  # else one for the whole weight


def _scales(
    parts: Mapping[str, Tensor],
    way: Storage,
    code: Code | None,
    shape: tuple[int, ...],
    levels: int,
    names: tuple[str, str, str],
) -> Tensor:
    """Return scales, zero points or levels as floats. `names`: of their part, of its factor and of its offset."""
    stored, factor, offset = parts[names[0]], parts.get(names[1]), parts.get(names[2])
    if code is None or factor is None:
        return stored
    unpacked = group_shape(stored, code, shape, way, levels)
    assert unpacked is not None
    if factor.numel() > 1:  # a table of levels
        return factor[_all(stored, code, torch.int64)].view(unpacked)
    values = _all(stored, code, factor.dtype).view(unpacked)
    return values.mul_(factor) if offset is None else torch.addcmul(offset, values, factor)


def _all(stored: Tensor, code: Code, dtype: torch.dtype) -> Tensor:
    if code.fields:
        return numbers(stored, code, slice(0, 1), stored_count(stored, code), dtype)
    return numbers(stored, code, slice(0, len(stored)), 0, dtype)

"""Rotations of activations in the C extension: see rotate.h."""

from __future__ import annotations

import torch
from torch import Tensor

from . import extension
from .int8_gemm import packed_numbers
from .layout_descriptors import TYPES
from .threads import over_rows

_LEAST_BOUND = 16  # the smallest group that bounds are known for: BOUND_LANES of rotate_bounds.h
_PASSES = 8  # over each number, about: what is worth another thread


def rotate_rows(x: Tensor, group: int) -> Tensor | None:
    """Do as `hadamard.rotate` for groups of a power of 4, if these kernels can: None for other devices and dtypes."""
    module, columns = extension(), x.shape[-1]
    if module is None or not x.is_cpu or x.dtype not in TYPES:
        return None
    x = x.contiguous()
    out, kind, size = torch.empty_like(x), TYPES[x.dtype], x.element_size()
    of, to = x.data_ptr(), out.data_ptr()

    def some(start: int, stop: int) -> None:
        spare = torch.empty(columns, dtype=torch.float32, device=x.device)
        at = start * columns * size
        module.rotate(packed_numbers((kind, of + at, stop - start, columns, group, spare.data_ptr(), to + at)))

    over_rows(x.numel() // max(columns, 1), columns, some)
    return out


def rotate_within(x: Tensor, group: int, out: Tensor, largest: Tensor, bounds: Tensor) -> bool:
    """Rotate rows of x [rows, columns] into `out`, float32; return whether these kernels can.

    Args:
        group: how many columns are rotated together, a power of 4.
        largest: the largest size in each group of `out`, float32 [rows, groups]; 0 where the bound is infinite.
        bounds: how far results of the same sums in another order may be from those in `out`, as `largest`.
    """
    module, (rows, columns) = extension(), x.shape
    if module is None or not x.is_cpu or x.dtype not in TYPES or group < _LEAST_BOUND:
        return False
    x = x.contiguous()
    kind, size, groups = TYPES[x.dtype], x.element_size(), columns // group

    def some(start: int, stop: int) -> None:
        to = (part.data_ptr() + start * row * 4 for part, row in ((out, columns), (largest, groups), (bounds, groups)))
        module.rotate_within(
            packed_numbers((kind, x.data_ptr() + start * columns * size, stop - start, columns, group, *to))
        )

    over_rows(rows, columns * _PASSES, some)
    return True


def code_within(y: Tensor, group: int, scale: Tensor, bounds: Tensor, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Round y / scale, rows of what `rotate_within` made, [rows, columns], to integers from `least` to `most`.

    Returns:
        Codes, int8 [rows, columns], and for which groups a number within its bound would have another one, bool
        [rows, groups].
    """
    module, (rows, columns) = extension(), y.shape
    assert module is not None
    groups = columns // group
    codes = torch.empty(rows, columns, dtype=torch.int8, device=y.device)
    undecided = torch.empty(rows, groups, dtype=torch.bool, device=y.device)

    def some(start: int, stop: int) -> None:
        of = y.data_ptr() + start * columns * 4, stop - start, columns, group
        limits = scale.data_ptr() + start * 4, bounds.data_ptr() + start * groups * 4, least, most
        to = codes.data_ptr() + start * columns, undecided.data_ptr() + start * groups
        module.code_within(packed_numbers((*of, *limits, *to)))

    over_rows(rows, columns * _PASSES, some)
    return codes, undecided

"""Rotations of activations in the C extension: see rotate.h."""

from __future__ import annotations

import torch
from torch import Tensor

from . import extension
from .int8 import packed_numbers
from .layout_descriptors import TYPES
from .threads import over_rows


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

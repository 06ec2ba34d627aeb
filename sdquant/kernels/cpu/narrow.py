"""The two products of a low-rank branch in the C extension: see narrow.h."""

from __future__ import annotations

import torch
from torch import Tensor

from . import extension
from .int8 import packed_numbers
from .threads import over_rows

_LEAST = 24  # rows, below which torch's products are as fast
_STEP = 12  # rows that are multiplied together


def add_product(y: Tensor, x: Tensor, down: Tensor, up: Tensor, *, is_turned: bool) -> bool:
    """Add (x down) up^T to y [rows, out], for x [rows, in]; return whether these kernels can, and pay.

    Args:
        down: [in, rank], or, if it `is_turned`, [rank, in]. up: [out, rank].
    """
    module, tensors, (rows, inputs), (outputs, rank) = extension(), (y, x, down, up), x.shape, up.shape
    if module is None or rows < _LEAST or not (inputs and rank and outputs):
        return False
    if not all(each.is_cpu and each.dtype is torch.float32 for each in tensors):
        return False
    if not y.is_contiguous() or (torch.is_grad_enabled() and any(each.requires_grad for each in tensors)):
        return False
    x, down, up = x.contiguous(), down.contiguous(), up.contiguous()
    between = torch.empty(rows, rank, dtype=torch.float32, device=x.device)
    results: list[bool] = []

    def some(start: int, stop: int) -> None:
        first = x.data_ptr() + start * inputs * 4, stop - start, inputs, down.data_ptr(), is_turned, rank
        second = up.data_ptr(), outputs, between.data_ptr() + start * rank * 4, y.data_ptr() + start * outputs * 4
        results.append(module.branch(packed_numbers((*first, *second))))

    over_rows(rows, (inputs + outputs) * rank, some, _STEP)
    return all(results)

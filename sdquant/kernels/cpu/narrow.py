"""The two products of a low-rank branch in the C extension: see narrow.h."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import extension
from .int8_gemm import c_functions, packed_numbers
from .layout_descriptors import TYPES
from .threads import over_rows

if TYPE_CHECKING:
    from torch import Tensor

LEAST = {torch.float32: 2, torch.bfloat16: 1}  # rows, below which torch's products are as fast
_TILE = 32  # numbers of the rank that are multiplied together
_MOST = 512  # of bfloat16, as NARROW_MOST of narrow.h
_STEP = 12  # rows that are multiplied together


def add_product(y: Tensor, x: Tensor, down: Tensor, up: Tensor, *, is_turned: bool) -> bool:
    """Add (x down) up^T to y [rows, out], for x [rows, in]; return whether these kernels can, and pay.

    Args:
        down: [in, rank], or, if it `is_turned`, [rank, in]. up: [out, rank].
    """
    tensors, (rows, inputs), (outputs, rank) = (y, x, down, up), x.shape, up.shape
    if not outputs or not can(x.dtype, inputs, rank) or rows < LEAST[x.dtype]:
        return False
    if not all(each.is_cpu and each.dtype is x.dtype for each in tensors):
        return False
    if not y.is_contiguous() or (torch.is_grad_enabled() and any(each.requires_grad for each in tensors)):
        return False
    x, up, laid = x.contiguous(), up.contiguous(), lay(down.contiguous(), is_turned=is_turned)
    kind, size, of_up = TYPES[x.dtype], x.element_size(), up.data_ptr()
    between = torch.empty(rows, rank, dtype=torch.float32, device=x.device)

    def some(start: int, stop: int) -> None:
        of, to = x.data_ptr() + start * inputs * size, y.data_ptr() + start * outputs * size
        branch = laid.data_ptr(), rank, of_up, between.data_ptr() + start * rank * 4
        c_functions().branch(packed_numbers((kind, inputs, of, stop - start, outputs, to, *branch)))

    over_rows(rows, (inputs + outputs) * rank, some, _STEP)
    return True


def can(dtype: torch.dtype, inputs: int, rank: int) -> bool:
    """Return whether this machine has these kernels for such numbers."""
    module = extension()
    if module is None or not inputs or not rank or dtype not in (torch.float32, torch.bfloat16):
        return False
    if dtype is torch.bfloat16 and (inputs % 2 or rank % 2 or rank > _MOST):
        return False
    return bool(module.branch_lay(packed_numbers((TYPES[dtype], 0, 0, 0, 0, 0))))  # of no rank


def lay(down: Tensor, *, is_turned: bool) -> Tensor:
    """Return `down`, contiguous, as the kernels want it; float32 or bfloat16."""
    rank, inputs = down.shape if is_turned else (down.shape[1], down.shape[0])
    size = inputs * down.element_size() * -(-rank // _TILE) * _TILE
    laid = torch.empty(size, dtype=torch.int8, device=down.device)
    numbers = TYPES[down.dtype], down.data_ptr(), is_turned, inputs, rank, laid.data_ptr()
    c_functions().branch_lay(packed_numbers(numbers))
    return laid

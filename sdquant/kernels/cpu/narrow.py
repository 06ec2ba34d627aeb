"""The two products of a low-rank branch in the C extension: see narrow.h."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import extension
from .int8_gemm import c_functions, packed_numbers
from .threads import over_rows

LEAST = 24  # rows, below which torch's products are as fast
STEP = 12  # rows that are multiplied together
_CPU = torch.device("cpu")


class Factors(NamedTuple):
    """The addresses of down, float32 [inputs, rank], or, if it `is_turned`, [rank, inputs], and of up, [outputs, rank],
    contiguous."""

    inputs: int
    outputs: int
    rank: int
    down: int
    up: int
    is_turned: bool


def add_product(y: Tensor, x: Tensor, down: Tensor, up: Tensor, *, is_turned: bool) -> bool:
    """Add (x down) up^T to y [rows, out], for x [rows, in]; return whether these kernels can, and pay.

    Args:
        down: [in, rank], or, if it `is_turned`, [rank, in]. up: [out, rank].
    """
    tensors, (rows, inputs), (outputs, rank) = (y, x, down, up), x.shape, up.shape
    if rows < LEAST or not (inputs and rank and outputs):
        return False
    if not all(each.is_cpu and each.dtype is torch.float32 for each in tensors):
        return False
    if not y.is_contiguous() or (torch.is_grad_enabled() and any(each.requires_grad for each in tensors)):
        return False
    if not has_kernels():
        return False
    x, down, up = x.contiguous(), down.contiguous(), up.contiguous()
    add_rows(
        Factors(inputs, outputs, rank, down.data_ptr(), up.data_ptr(), is_turned), x.data_ptr(), rows, y.data_ptr()
    )
    return True


def has_kernels() -> bool:
    """Return whether this machine has these kernels."""
    module = extension()
    return module is not None and bool(module.branch(packed_numbers((0, 0, 1, 0, 0, 1, 0, 1, 0, 0))))  # of no rows


def add_rows(factors: Factors, x: int, rows: int, y: int) -> None:
    """Add (x down) up^T to y: the addresses of so many rows, contiguous. Threads split them."""

    def some(start: int, stop: int) -> None:
        at, to = x + start * factors.inputs * 4, y + start * factors.outputs * 4
        add_some(factors, at, stop - start, empty_between(factors, stop - start), to)

    over_rows(rows, (factors.inputs + factors.outputs) * factors.rank, some, STEP)


def empty_between(factors: Factors, rows: int) -> Tensor:
    """Return memory for x down: float32 [rows, rank]."""
    return torch.empty(rows, factors.rank, dtype=torch.float32, device=_CPU)


def add_some(factors: Factors, x: int, rows: int, between: Tensor, y: int) -> None:
    """Do as `add_rows`, in this thread."""
    inputs, outputs, rank, down, up, is_turned = factors
    numbers = x, rows, inputs, down, is_turned, rank, up, outputs, between.data_ptr(), y
    c_functions().branch(packed_numbers(numbers))

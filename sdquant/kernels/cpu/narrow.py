"""The two products of a low-rank branch in the C extension: see narrow.h."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import extension, isa
from .int8_gemm import c_functions, packed_numbers
from .layout_descriptors import TYPES
from .threads import over_rows

if TYPE_CHECKING:
    from torch import Tensor

_TILE = 32  # numbers of the rank that are multiplied together
_MOST = 512  # of bfloat16, as NARROW_MOST of narrow.h
STEP = 12  # rows that are multiplied together; TALL of avx512_narrow.c
_NONE = (0,) * 6  # a branch of no rank
_DTYPES = (torch.float32, torch.bfloat16)
_CPU = torch.device("cpu")


def add_product(y: Tensor, x: Tensor, down: Tensor, up: Tensor, *, is_turned: bool) -> bool:
    """Add (x down) up^T to y [rows, out], for x [rows, in]; return whether these kernels can.

    Args:
        down: [in, rank], or, if it `is_turned`, [rank, in]. up: [out, rank].
    """
    tensors, inputs, (outputs, rank) = (y, x, down, up), x.shape[1], up.shape
    if not outputs or not can(x.dtype, inputs, rank):
        return False
    if not all(each.is_cpu and each.dtype is x.dtype for each in tensors):
        return False
    if not y.is_contiguous() or (torch.is_grad_enabled() and any(each.requires_grad for each in tensors)):
        return False
    add(y, x.contiguous(), down.contiguous(), up.contiguous(), is_turned)
    return True


def add(y: Tensor, x: Tensor, down: Tensor, up: Tensor, is_turned: bool) -> None:
    """Do so with what the kernels can, contiguous; y and x may be of more dimensions."""
    outputs, rows = up.shape[0], x.numel() // x.shape[-1]
    numbers, _kept = factors(down, up, rows, is_turned)
    _multiply(x, numbers, outputs, y.data_ptr())


def between(x: Tensor, numbers: tuple[int, ...]) -> Tensor:
    """Return x [..., in] times the first factor, rounded to x's dtype, as C has it.

    Args:
        numbers: of `factors`.
    """
    return _multiply(x, numbers, 0, 0)


def _multiply(x: Tensor, numbers: tuple[int, ...], outputs: int, to: int) -> Tensor:
    """Multiply x by both factors, and add the product to `outputs` columns at the address `to`; return what is between
    the two."""
    rank, inputs = numbers[0], x.shape[-1]
    rows, kind, size, of = x.numel() // inputs, TYPES[x.dtype], x.element_size(), x.data_ptr()
    between = torch.empty(rows, rank, dtype=torch.float32, device=_CPU)
    at, branch = between.data_ptr(), c_functions().branch

    def some(start: int, stop: int) -> None:
        here = of + start * inputs * size, stop - start, outputs, to + start * outputs * size
        branch(packed_numbers((kind, inputs, *here, *numbers, at + start * rank * 4)))

    if rows <= STEP:
        some(0, rows)
    else:
        over_rows(rows, (inputs + outputs) * rank, some, STEP)
    return between


def is_in_products(dtype: torch.dtype) -> bool:
    """Return whether products with a weight take a branch and divisors, too."""
    return dtype is torch.bfloat16 and isa() == "amx"


def divisors(smooth: Tensor) -> Tensor:
    """Return what divides columns as C takes it: float32 [2, columns], the second row with the reciprocals."""
    by = smooth.to(torch.float32)
    return torch.stack((by, by.reciprocal()))


def can(dtype: torch.dtype, inputs: int, rank: int) -> bool:
    """Return whether this machine has these kernels for such numbers."""
    module = extension()
    if module is None or not inputs or not rank or dtype not in _DTYPES:
        return False
    if dtype is torch.bfloat16 and (inputs % 2 or rank % 2 or rank > _MOST):
        return False
    return bool(module.branch_lay(packed_numbers((TYPES[dtype], 0, 0, *_NONE))))


def factors(down: Tensor, up: Tensor, rows: int, is_turned: bool) -> tuple[tuple[int, ...], Tensor | None]:
    """Return the two factors as the numbers that C takes, for products of so many rows, and the memory to be kept
    meanwhile.

    Args:
        down, up: contiguous, of float32 or bfloat16.
    """
    rank, laid = up.shape[1], None
    numbers = rank, down.data_ptr(), is_turned
    if rows > STEP:
        inputs = down.numel() // rank
        size = inputs * down.element_size() * -(-rank // _TILE) * _TILE
        laid = torch.empty(size, dtype=torch.int8, device=_CPU)
        c_functions().branch_lay(packed_numbers((TYPES[down.dtype], inputs, laid.data_ptr(), *numbers, 0, 0, 0)))
    return (*numbers, 0 if laid is None else laid.data_ptr(), up.data_ptr()), laid

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

_TILE = 32  # numbers of the rank, and in halves of inputs, that are multiplied together
_HALVES = 2  # times the halves of each number of the factors, beside the bit of what is turned: see narrow.h
_MOST = 512  # of bfloat16, as NARROW_MOST of narrow.h
STEP = 12  # rows that are multiplied together; TALL of avx512_narrow.c
_NONE = (0,) * 6  # a branch of no rank
_UNDIVIDED = (0,) * 3
_DTYPES = (torch.float32, torch.bfloat16)
_CPU = torch.device("cpu")


def add_product(y: Tensor, x: Tensor, down: Tensor, up: Tensor, *, is_turned: bool, in_halves: bool = False) -> bool:
    """Add (x down) up^T to y [rows, out], for x [rows, in]; return whether these kernels can.

    Args:
        down: [in, rank], or, if it `is_turned`, [rank, in]. up: [out, rank]. Of x's dtype; beside float32 also
            of 16 bits, as files have them.
        in_halves: see `factors`.
    """
    tensors, inputs, (outputs, rank) = (y, x, down, up), x.shape[1], up.shape
    if not outputs or not can(x.dtype, inputs, rank) or not all(each.is_cpu for each in tensors):
        return False
    if y.dtype is not x.dtype or not (is_exact(down, x.dtype) and is_exact(up, x.dtype)):
        return False
    if not y.is_contiguous() or (torch.is_grad_enabled() and any(each.requires_grad for each in tensors)):
        return False
    add(y, x.contiguous(), down.contiguous(), up.contiguous(), is_turned, in_halves)
    return True


def add(y: Tensor, x: Tensor, down: Tensor, up: Tensor, is_turned: bool, in_halves: bool) -> None:
    """Do so with what the kernels can, contiguous; y and x may be of more dimensions."""
    outputs, rows = up.shape[0], x.numel() // x.shape[-1]
    numbers, _divisors, _kept = factors(down, up, x.dtype, rows, is_turned, in_halves=in_halves)
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


def is_exact(part: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a part of a branch is of the dtype of activations, or `widened` to that."""
    return part.dtype is dtype or (dtype is torch.float32 and part.dtype in TYPES)


def widened(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a part of a branch in the dtype of activations, if that is exact; else itself."""
    return part.to(dtype) if is_exact(part, dtype) else part


def is_in_products(dtype: torch.dtype) -> bool:
    """Return whether products with a weight take a branch and divisors, too."""
    return dtype is torch.bfloat16 and isa() == "amx"


def can(dtype: torch.dtype, inputs: int, rank: int) -> bool:
    """Return whether this machine has these kernels for such numbers."""
    module = extension()
    if module is None or not inputs or not rank or dtype not in _DTYPES:
        return False
    if dtype is torch.bfloat16 and (inputs % 2 or rank % 2 or rank > _MOST):
        return False
    return bool(module.branch_lay(packed_numbers((TYPES[dtype], 0, 0, *_NONE, *_UNDIVIDED))))


def _halves(down: Tensor, up: Tensor, dtype: torch.dtype) -> int:
    """Return how many bfloat16 each number of the factors is beside activations of this dtype; 0 if they are not."""
    rank = up.shape[1]
    if dtype is not torch.float32 or isa() != "amx" or rank % 2 or rank > _MOST // 2:
        return 0
    return 1 if down.dtype is up.dtype is torch.bfloat16 else 2


def factors(
    down: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    rows: int,
    is_turned: bool,
    smooth: Tensor | None = None,
    *,
    in_halves: bool = False,
) -> tuple[tuple[int, ...], int, tuple[Tensor, ...]]:
    """Return what C takes for products of so many rows: the two factors as numbers, the address of what divides columns
    of x, float32 [2, columns] whose second row has the reciprocals (0 for none), and what is to be kept meanwhile.

    Args:
        down, up: contiguous. dtype: of x, float32 or bfloat16, in which they are exact. smooth: contiguous, [columns].
        in_halves: whether float32 of more than a few rows may be multiplied as two bfloat16 each, with 2^-16 of error,
            where that is faster.
    """
    rank = up.shape[1]
    inputs, is_laid = down.numel() // rank, rows > STEP
    halves = _halves(down, up, dtype) if in_halves and is_laid else 0
    if halves != 1:
        down, up = widened(down, dtype), widened(up, dtype)
    numbers = (rank, down.data_ptr(), int(is_turned) | _HALVES * halves)
    tall = -(-inputs // _TILE) * _TILE if halves else inputs
    size = tall * down.element_size() * -(-rank // _TILE) * _TILE if is_laid else 0
    more = 0 if smooth is None else 2 * inputs * 4
    if not size and not more:
        return (*numbers, 0, up.data_ptr()), 0, (down, up)
    # One piece of memory and one call: in a model each of torch's own would take a hundredth of a layer's time.
    memory = torch.empty(size + more, dtype=torch.int8, device=_CPU)
    at = memory.data_ptr()
    laid, by = at if size else 0, at + size if more else 0
    divided = _UNDIVIDED if smooth is None else (TYPES[smooth.dtype], smooth.data_ptr(), by)
    c_functions().branch_lay(packed_numbers((TYPES[dtype], inputs, laid, *numbers, 0, 0, 0, *divided)))
    return (*numbers, laid, up.data_ptr()), by, (memory, down, up)

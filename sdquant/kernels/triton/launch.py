"""Launches of the kernels over weights: decoding and two products."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton

from ...core import dtype_name
from .blocks import block_of
from .launch_config import EXACT, INTERPRETED, Launch, plan_of, plane_size, pointers, works_on
from .weights import decode_kernel, one_row_kernel, rows_kernel

__all__ = ["INTERPRETED", "decode", "multiplies", "product", "works_on"]

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ...core import PackedLayout

DECODED_AT_ONCE = 4096  # weights for each program that decodes
ALIGNED_ROWS = DECODED_AT_ONCE // 32  # rows at which a program begins, of a multiple of 32 columns
_WARPS = 4


def decode(
    form: PackedLayout, parts: Mapping[str, Tensor], out: Tensor, start: int = 0, stop: int | None = None
) -> Launch:
    """Return the launch that dequantizes rows `start` to `stop`, or all, into `out`, contiguous [rows, columns].

    Both are multiples of ALIGNED_ROWS if the columns are one of 32, but for a `stop` at the end.
    """
    plan, stop = plan_of(form, parts), form.rows if stop is None else stop
    at_once = DECODED_AT_ONCE // (32 if plan.block.lanes == 1 else plan.block.weights)
    each = at_once * plan.block.weights
    first = start * form.columns // each
    assert first * each == start * form.columns
    arguments = {
        "out": out,
        "first": first,
        **pointers(form, parts, plan.block),
        **plan.numbers,
        **plan.compiled,
        "OUT": dtype_name(out.dtype),
        "BLOCK_C": at_once,
    }
    grid = (math.ceil(stop * form.columns / each) - first,)
    return Launch(decode_kernel, grid, arguments, {"num_warps": _WARPS, **EXACT})


def shared_bytes(form: PackedLayout) -> int:
    """Return the number of rows that share bytes: for quanto's planes, if each plane is whole rows; else 1."""
    if not form.packing.startswith("planes"):
        return 1
    many = 8 // int(form.packing[-1])
    return many if form.rows % many == 0 and plane_size(form) == form.rows // many * form.columns else 1


def multiplies(form: PackedLayout) -> bool:
    """Return whether the product kernels can be used: each row must begin at the start of a chunk or a block."""
    block = block_of(form)
    return block is not None and block.lanes > 1 and form.columns % block.aligned_to == 0


def product(form: PackedLayout, parts: Mapping[str, Tensor], x: Tensor, bias: Tensor | None, out: Tensor) -> Launch:
    """Return the launch that writes x [m, columns] @ weight.T + bias [rows] to `out` [m, rows]; all contiguous."""
    plan, m, split = plan_of(form, parts), x.shape[0], shared_bytes(form)
    weight = {**pointers(form, parts, plan.block), **plan.numbers, **plan.compiled}
    per_row = form.columns // plan.block.weights
    compiled = {"OUT": dtype_name(x.dtype), "SPLIT": split, "BIASED": bias is not None}
    tensors: dict[str, object] = {"x": x, "bias": x if bias is None else bias, "out": out}
    if m == 1:
        # 256 lanes a row and turn: a turn is 2 KB of activations, which all programs find in the cache.
        many, at_once = 4 * split if split < 4 else 8, max(1, 256 // plan.block.lanes)
        sizes = {"BLOCK_N": many, "BLOCK_C": at_once}
        arguments: dict[str, object] = {**tensors, "rows": form.rows, "per_row": per_row, **weight, **compiled, **sizes}
        return Launch(one_row_kernel, (_programs(form.rows, many, split),), arguments, {"num_warps": _WARPS, **EXACT})
    tall = min(64, max(16, triton.next_power_of_2(m)))
    # Narrow tiles where wide ones would leave most of a card's processors without work. Of q6_k a program with 64 rows
    # of x has two thirds of the instructions in a wide one, and does not spill.
    many = 32 if form.rows <= 4096 and (tall < 64 or form.packing != "q6_k") else 64
    at_once = max(1, 64 // plan.block.lanes)
    sizes = {"BLOCK_M": tall, "BLOCK_N": many, "BLOCK_C": at_once}
    shape = {"m_rows": m, "rows": form.rows, "columns": form.columns, "per_row": per_row}
    arguments = {**tensors, **shape, **weight, **compiled, **sizes}
    grid = (_programs(form.rows, many, split), math.ceil(m / tall))
    return Launch(rows_kernel, grid, arguments, {"num_warps": _WARPS, "num_stages": 2, **EXACT})


def _programs(rows: int, many: int, split: int) -> int:
    return math.ceil(rows // split / (many // split)) if split > 1 else math.ceil(rows / many)

"""Launches of the kernels over weights: what a form needs for them, found out once for each."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton

from ...backends import _bnb_tables
from ...backends._gguf_iq import _NON_LINEAR
from . import eight
from .blocks import Block, block_of
from .running import EXACT, INTERPRETED, Launch, name_of, works_on
from .weights import decode_kernel, one_row_kernel, rows_kernel

__all__ = ["decode", "eight", "multiplies", "product", "works_on"]

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ..forms import Form

DECODED_AT_ONCE = 4096  # weights for each program that decodes
_WARPS = 4


@dataclass(frozen=True)
class _Plan:
    """What is the same for all launches over weights of one form: numbers and what is compiled in."""

    block: Block
    numbers: dict[str, int | float]
    compiled: dict[str, Any]


@lru_cache(maxsize=4096)
def _plan(form: Form) -> _Plan:
    block = block_of(form)
    assert block is not None  # `reads` said so
    plane = 0
    if form.packing.startswith("planes"):
        groups = form.rows * form.columns // form.group
        plane = -(-groups * int(form.packing[-1]) // 8) * form.group
    own = block.family == "form"
    zero = "" if not isinstance(form.zero, str) else "nibbles-low" if form.zero_packing == "nibbles-low" else "bytes"
    numbers: dict[str, int | float] = {
        "group": form.group,
        "plane_size": plane,
        "offset": form.offset,
        "factor": form.factor,
        "number": float(form.zero) if not isinstance(form.zero, str) else 0.0,
        "count": form.rows * form.columns,
    }
    compiled = {
        "FAMILY": block.family,
        "PACKING": form.packing if own else "",
        "PLANES": block.planes,
        "LANES": block.lanes,
        "ORDER": block.order,
        "TABLE": bool(form.table if own else block.table),
        "SCALE": ("nested" if form.nested else "floats" if form.scale else "") if own else "",
        "ZERO": zero or ("number" if form.zero else ""),
        "FACTOR": form.factor != 1.0,
        "SHIFT": ("added" if form.added else "subtracted") if form.shift else "",
        "FUSED": form.fused,
        "ARITHMETIC": form.arithmetic,
        "CHUNKS": block.chunks,
        "NBYTES": block.nbytes,
        "D": block.scale,
        "M": block.minimum,
        "Q": block.codes,
        "H": block.high,
        "Z": block.zero,
        "BITS": INTERPRETED,
    }
    return _Plan(block, numbers, compiled)


def _tensors(form: Form, parts: Mapping[str, Tensor], block: Block) -> dict[str, Tensor]:
    """The pointers that the kernels take; one that is not used is the codes'."""
    codes = parts[form.codes]
    if codes.dtype not in (torch.int8, torch.uint8):
        codes = codes.view(torch.uint8)
    table = form.table if block.family == "form" else block.table
    return {
        "codes": codes,
        "scale": parts[form.scale] if form.scale else codes,
        "nested": parts[form.nested] if form.nested else codes,
        "zero": parts[form.zero] if isinstance(form.zero, str) else codes,
        "shift": parts[form.shift] if form.shift else codes,
        "table": table_of(table, codes.device) if table else codes,
        "dynamic": table_of("dynamic", codes.device) if form.nested else codes,
    }


@cache
def table_of(name: str, device: torch.device) -> Tensor:
    """What the codes of a table stand for, float32."""
    if name == "iq4":
        return torch.tensor(_NON_LINEAR, dtype=torch.float32, device=device)
    if name == "dynamic":
        return _bnb_tables.dynamic_code(device)
    return _bnb_tables.e4m3_code(device) if name == "e4m3" else _bnb_tables.fourbit_code(name, device)


def decode(form: Form, parts: Mapping[str, Tensor], out: Tensor) -> Launch:
    """The weight into `out`, contiguous [rows, columns]."""
    plan = _plan(form)
    chunks = math.ceil(form.rows * form.columns / plan.block.weights)
    at_once = DECODED_AT_ONCE // (32 if plan.block.lanes == 1 else plan.block.weights)
    arguments = {
        "out": out,
        **_tensors(form, parts, plan.block),
        **plan.numbers,
        **plan.compiled,
        "OUT": name_of(out.dtype),
        "BLOCK_C": at_once,
    }
    return Launch(decode_kernel, (math.ceil(chunks / at_once),), arguments, {"num_warps": _WARPS, **EXACT})


def shared_bytes(form: Form) -> int:
    """How many rows of a product share their bytes: of quanto's planes, where each plane is whole rows; else 1."""
    if not form.packing.startswith("planes"):
        return 1
    many = 8 // int(form.packing[-1])
    return (
        many if form.rows % many == 0 and _plan(form).numbers["plane_size"] == form.rows // many * form.columns else 1
    )


def multiplies(form: Form) -> bool:
    """Whether the products can be used: each row begins at the beginning of a chunk, or of a block."""
    block = block_of(form)
    return block is not None and block.lanes > 1 and form.columns % block.aligned_to == 0


def product(form: Form, parts: Mapping[str, Tensor], x: Tensor, out: Tensor) -> Launch:
    """x [m, columns] times the transposed weight into `out` [m, rows], both contiguous."""
    plan, m, split = _plan(form), x.shape[0], shared_bytes(form)
    weight = {**_tensors(form, parts, plan.block), **plan.numbers, **plan.compiled}
    per_row = form.columns // plan.block.weights
    compiled = {"OUT": name_of(x.dtype), "SPLIT": split}
    if m == 1:
        # 256 lanes a row and turn: a turn is 2 KB of activations, which all programs find in the cache.
        many, at_once = 4 * split if split < 4 else 8, max(1, 256 // plan.block.lanes)
        sizes = {"BLOCK_N": many, "BLOCK_C": at_once}
        arguments = {"x": x, "out": out, "rows": form.rows, "per_row": per_row, **weight, **compiled, **sizes}
        return Launch(one_row_kernel, (_programs(form.rows, many, split),), arguments, {"num_warps": _WARPS, **EXACT})
    tall = min(64, max(16, triton.next_power_of_2(m)))
    # Narrow tiles where wide ones would leave most of a card's processors without work.
    many = 32 if form.rows <= 4096 else 64
    at_once = max(1, 64 // plan.block.lanes)
    sizes = {"BLOCK_M": tall, "BLOCK_N": many, "BLOCK_C": at_once}
    shape = {"m_rows": m, "rows": form.rows, "columns": form.columns, "per_row": per_row}
    arguments = {"x": x, "out": out, **shape, **weight, **compiled, **sizes}
    grid = (_programs(form.rows, many, split), math.ceil(m / tall))
    return Launch(rows_kernel, grid, arguments, {"num_warps": _WARPS, "num_stages": 2, **EXACT})


def _programs(rows: int, many: int, split: int) -> int:
    return math.ceil(rows // split / (many // split)) if split > 1 else math.ceil(rows / many)

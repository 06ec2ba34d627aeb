"""Packed layouts as the extension's own objects, each built once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core import code_tables, ggml_iq, gguf_types, torch_dtypes
from . import extension

if TYPE_CHECKING:
    from ...core import PackedLayout
    from ..base import Parts

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NAMES = {"float32": 0, "bfloat16": 1, "float16": 2}
_NONE, _NESTED, _LOOKED_UP = -1, 3, 4
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_SCALES = (torch.float8_e4m3fn, torch_dtypes.E8M0)
_CPU = torch.device("cpu")


def describe_layout(form: PackedLayout, parts: Parts) -> Any | None:
    """Return the extension's object for a form whose scales have these dtypes; None if it cannot read such a form."""
    if form.apart:
        return None
    return _plan(form, parts[form.scale].dtype if form.scale else None, parts[form.shift].dtype if form.shift else None)


def addresses(form: PackedLayout, parts: Parts) -> tuple[int, int, int, int, int]:
    """Return the addresses of the codes, scales, outer scales, zero points (or codebook) and shifts; 0 for none."""
    return (
        parts[form.codes].data_ptr(),
        parts[form.scale].data_ptr() if form.scale else 0,
        parts[form.nested].data_ptr() if form.nested else 0,
        parts[form.zero].data_ptr() if isinstance(form.zero, str) else grid(form),
        parts[form.shift].data_ptr() if form.shift else 0,
    )


@lru_cache(maxsize=4096)
def _plan(form: PackedLayout, scale: torch.dtype | None, shift: torch.dtype | None) -> Any | None:
    module = extension()
    scales = _NESTED if form.nested else _LOOKED_UP if scale in _SCALES else _type(scale)
    if module is None or scales is None or _type(shift) is None:
        return None
    per_group = isinstance(form.zero, str)
    return module.form(
        form.rows,
        form.columns,
        form.group,
        form.taps,
        form.packing,
        scales,
        _type(shift),
        _NAMES[form.arithmetic],
        form.zero_packing if per_group else "",
        form.added,
        form.fused,
        0.0 if isinstance(form.zero, str) else float(form.zero),
        1.0 if scales == _LOOKED_UP else form.factor,
        form.offset,
        _table(form),
        _scale_table(form, scale),
    )


def _type(dtype: torch.dtype | None) -> int | None:
    return _NONE if dtype is None else TYPES.get(dtype)


def _table(form: PackedLayout) -> bytes:
    """Return the float32 values of the codes; empty if codes are their own values."""
    if form.packing in _FLOAT8:
        return _bytes(code_tables.float8_values(getattr(torch, form.packing), torch.float32, _CPU))
    return _bytes(code_tables.code_table(form.table, form.arithmetic, _CPU)) if form.table else b""


def _scale_table(form: PackedLayout, scale: torch.dtype | None) -> bytes:
    """Return the float32 values of the scales' codes, times the factor if they are float8; empty if they are floats."""
    if form.nested:
        return _bytes(code_tables.dynamic_code(_CPU))
    if scale is None or scale not in _SCALES:
        return b""
    # Times the factor, which is why the kernels get none.
    return _bytes(code_tables.float8_values(scale, torch.float32, _CPU) * form.factor)


def _bytes(table: Tensor) -> bytes:
    return table.numpy().tobytes()


def is_blocks(form: PackedLayout) -> bool:
    """Return whether the codes are blocks of ggml's layout."""
    return form.packing in gguf_types.TYPES


def grid(form: PackedLayout) -> int:
    """Return the address of the type's int8 codebook, whose rows its codes select; 0 if it has none."""
    return ggml_iq.grid(form.packing).data_ptr() if form.packing in ggml_iq.GRIDS else 0


@cache  # at every call of a small layer
def by_block(form: PackedLayout) -> PackedLayout:
    """Return the same layout with one row per block, if rows are not whole blocks (SDXL's 320 inputs in blocks of 256):
    threads split the work by rows, and decoders begin and end with a block."""
    if form.columns % form.group == 0:
        return form
    return replace(form, rows=form.rows * form.columns // form.group, columns=form.group)

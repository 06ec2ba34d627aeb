"""Products in integers with schemes that quantize activations themselves (`Backend.computes`), by the C kernels.

The numbers are those of the backend's own `linear`, bit for bit: each kind of weight is held against it at first use.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..rows import cut
from .int8_steps import Coding, direct
from .native import int8 as native
from .native.prepared import Codes

if TYPE_CHECKING:
    from ..backends.base import Backend, Packed
    from .forms import Activations, Form
    from .reader import Prepared

log = logging.getLogger(__name__)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_UNPACKED = ("nibbles-low", "threes")
_CHECKED_ROWS = 40
_verdicts: dict[tuple[object, ...], bool] = {}


def coding(form: Form | None) -> Coding | None:
    """Which codes of a weight are multiplied; None where they are no integers of one scale a row."""
    if direct(form):
        return Coding.BY_ROW
    if form is not None and form.by_row and form.packing in _UNPACKED and not form.table and isinstance(form.zero, int):
        return Coding.UNPACKED
    return None


def prepared(backend: Backend, packed: Packed, form: Form | None, dtype: torch.dtype, prefix: str) -> Prepared | None:
    """`backend.linear` and the bias, for a layer's activations of `dtype`; None where it is not done here."""
    how, codes = backend.activations(packed), coding(form)
    if form is None or how is None or codes is None or dtype not in _FLOATS or len(packed.spec.shape) != 2:
        return None
    if not native.reads(form, packed.parts):
        return None
    key = (replace(form, rows=0, group=0), how, dtype, *[part.dtype for part in packed.parts.values()])
    if key not in _verdicts:
        _verdicts[key] = _right(backend, packed, how, dtype)
    return Codes(form, packed.parts, dtype, codes, how, prefix) if _verdicts[key] else None


def _right(backend: Backend, packed: Packed, how: Activations, dtype: torch.dtype) -> bool:
    if backend.by_row(packed) and packed.spec.shape[0] > _CHECKED_ROWS:
        packed = cut(packed, [(0, _CHECKED_ROWS)])
    form = backend.form(packed)
    codes = coding(form)
    assert form is not None and codes is not None
    x = torch.linspace(-3, 3, 5 * form.columns).sin().view(5, form.columns)
    x[1], x[2] = 0, x[2] * 1e-3
    x = x.to(dtype)
    bias = torch.linspace(-1, 1, form.rows).to(dtype)
    found = Codes(form, packed.parts, dtype, codes, how, "")(x, {**packed.parts, "bias": bias})
    with torch.inference_mode():
        same = found is not None and torch.equal(found, backend.linear(packed, x) + bias)
    if not same:
        log.warning(
            "The C kernels are not used for %s with quantized activations: they compute other numbers. It runs in "
            "torch, slower.",
            packed.spec.scheme,
        )
    return same

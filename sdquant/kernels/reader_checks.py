"""Checks of a reader against the backend's own decoding, which `dispatch` makes the first time that a kind of weight is
used on a kind of device."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..core import packed_rows
from . import fp32_gemm

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import Backend, Packed, PackedLayout
    from .base import Reader

log = logging.getLogger(__name__)

_CHECKED_ROWS = 16


def is_right(reader: Reader, backend: Backend, packed: Packed, dtype: torch.dtype) -> bool:
    """Return whether a reader gives correct results for weights like this one; log it if it does not."""
    if backend.by_row(packed):
        packed = packed_rows.take(packed, torch.arange(min(packed.spec.shape[0], _CHECKED_ROWS), device=packed.device))
    form = backend.form(packed)
    assert form is not None
    why = ""
    try:
        expected = backend.decode(packed, dtype).view(form.rows, form.columns)
        got = torch.full_like(expected, torch.nan)
        reader.decode_into(form, packed.parts, got)
        if not torch.equal(got, expected) and not torch.equal(got.nan_to_num(), expected.nan_to_num()):
            why = "the decoded weights are wrong"
        elif reader.few(form, packed.parts, dtype) and not _multiplies(reader, form, packed, expected):
            why = "the products are wrong"
        elif not _decodes_rows(reader, form, packed, expected):
            why = "some rows decoded alone are wrong"
        elif not _rounds(reader, form, packed, expected):
            why = "the rounded weights are wrong"
    except Exception as error:  # whatever it is: the kernel does not work here, and torch does
        why = f"{type(error).__name__}: {error}"
    if why:
        log.warning(
            "The %s kernels are not used for %s on %s: %s. Using torch instead, which is slower.",
            reader.name, packed.spec.scheme, packed.device.type, why,
        )  # fmt: skip
    return not why


def _decodes_rows(reader: Reader, form: PackedLayout, packed: Packed, weight: Tensor) -> bool:
    """Return whether rows of the weight decoded alone, if the reader can do so, are the same."""
    first = len(weight) // 3
    got = torch.full_like(weight[first:], torch.nan)
    if not reader.rows_into(form, packed.parts, first, len(weight), got):
        return True
    return torch.equal(got.nan_to_num(), weight[first:].nan_to_num())


def _rounds(reader: Reader, form: PackedLayout, packed: Packed, weight: Tensor) -> bool:
    """Return whether rounded rows in float32, if the reader has them, are those of the weight."""
    first = len(weight) // 3
    got = torch.full((len(weight) - first, form.columns), torch.nan, dtype=torch.float32, device=weight.device)
    if not fp32_gemm.is_profitable(weight.dtype) or not reader.rounded(
        form, packed.parts, weight.dtype, first, len(weight), got
    ):
        return True
    return torch.equal(got.nan_to_num(), weight[first:].float().nan_to_num())


def _multiplies(reader: Reader, form: PackedLayout, packed: Packed, weight: Tensor) -> bool:
    """Return whether products of one, a few and many rows are as close to the exact ones as float32 sums, rounded once,
    are: readers have different kernels for them."""
    dtype = weight.dtype
    if reader.unrounded(form, packed.parts, dtype):
        weight = torch.empty_like(weight, dtype=torch.float32)
        reader.decode_into(replace(form, arithmetic="float32"), packed.parts, weight)
    most = max(reader.few_patches(form, packed.parts, dtype), reader.most(form, packed.parts, dtype))
    numbers = sorted({1, min(3, most), min(64, most)})
    return all(_multiplies_rows(m, reader, form, packed, weight, dtype) for m in numbers)


def _multiplies_rows(
    m: int, reader: Reader, form: PackedLayout, packed: Packed, weight: Tensor, dtype: torch.dtype
) -> bool:
    x = torch.linspace(-1, 1, m * form.columns, dtype=torch.float32, device=weight.device).view(m, -1).to(dtype)
    out = torch.empty(m, form.rows, dtype=dtype, device=weight.device)
    bias = torch.linspace(1, -1, form.rows, dtype=torch.float32, device=weight.device).to(dtype)
    reader.product(form, packed.parts, x, bias, out)
    wide, matrix, added = x.cpu().double(), weight.cpu().double().T, bias.cpu().double()  # some cards have no float64
    exact, sizes = wide @ matrix + added, wide.abs() @ matrix.abs() + added.abs()
    allowed = torch.finfo(out.dtype).eps * exact.abs() + 1e-5 * sizes + torch.finfo(out.dtype).tiny
    return bool(((out.cpu().double() - exact).abs() <= allowed).all()) or not bool(exact.isfinite().all())

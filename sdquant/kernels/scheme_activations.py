"""Kernels for schemes that quantize activations themselves (`Backend.computes`).

Integer products use the C kernels, or Triton's on a card, which are bit-equal to the backend's own `linear` and
`convolve`: each kind of weight is checked against them at first use. Others are float products with the dequantized
weight, whose sums are in another order.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ..core import Geometry, packed_rows, torch_dtypes
from . import dispatch, scheme_convolutions
from .base import Coding
from .cpu import int8 as native
from .cpu.bound_linear import Codes
from .dispatch_guard import undisturbed
from .im2col import outputs
from .int8_reference import RUN, direct, in_runs
from .triton import imports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ..core import Activations, Backend, Packed, PackedLayout
    from .base import Prepared

log = logging.getLogger(__name__)

_UNPACKED = ("nibbles-low", "twos", "threes", "fives", "sixes", "sevens")
_CHECKED_ROWS = 40
# Of a weight and of activations on a GPU: more than one of the largest tiles.
_ROWS_OF_TILES, _OF_TILES = 144, 130
_verdicts: dict[tuple[object, ...], bool] = {}


@lru_cache(maxsize=4096)
def _of_any_size(form: PackedLayout, how: Activations) -> PackedLayout:
    return replace(form, rows=0, group=form.group if how.tile else 0)


@lru_cache(maxsize=4096)
def coding(form: PackedLayout | None, how: Activations) -> Coding | None:
    """Return which codes of a weight are multiplied; None if they are not integers or have other tiles than `how`."""
    if form is None or form.table or form.taps > 1:
        return None
    unpacked = Coding.UNPACKED if form.packing in _UNPACKED and isinstance(form.zero, int) else Coding.BY_ROW
    if not how.tile:
        return unpacked if direct(form) or (unpacked and form.by_row) else None
    fits = form.group == how.tile and how.tile % RUN == 0 and form.columns % how.tile == 0
    return unpacked | Coding.BY_RUN if fits and (unpacked or in_runs(form, 1)) else None


def prepared(
    backend: Backend, packed: Packed, form: PackedLayout | None, how: Activations, dtype: torch.dtype, prefix: str
) -> Prepared | None:
    """Return `backend.linear` with bias, prepared for a layer's activations of `dtype`; None if no kernel supports it.

    Args:
        how: `backend.activations` of the weight.
    """
    codes = coding(form, how)
    if form is None or codes is None or len(packed.spec.shape) != 2:
        return None
    if packed.device.type != "cpu":
        bind = imports.scheme_binder()
        if bind is None or not _by_launches(backend, packed, form, how, dtype):
            return None
        return bind(form, packed.parts, dtype, how, prefix)
    if not _by_c(backend, packed, form, how, dtype):
        return None
    return Codes(form, packed.parts, dtype, codes, how, prefix)


def prepared_floats(
    backend: Backend, packed: Packed, form: PackedLayout | None, dtype: torch.dtype, prefix: str
) -> Prepared | None:
    """Return the product of `Backend.as_floats` with bias, prepared as `prepared` is, on a card."""
    how = None if form is None or packed.device.type != "cuda" else backend.float_rounding(packed, dtype)
    if form is None or how is None:
        return None
    bind, scale, of = imports.floats_binder(), packed.parts[form.scale], _computed_in(dtype)
    if bind is None or (not how.decoded and (imports.scaling(packed.device) is None or scale.numel() != form.rows)):
        return None
    operand = form if how.decoded else _bare(form)
    reader = dispatch.way(backend, packed, form, dtype).reader
    kernels = dispatch.way(backend, packed, operand, dtype if how.decoded else of)
    if reader is None or kernels.reader is None:
        return None
    most = kernels.reader.most(operand, packed.parts, dtype if how.decoded else of)
    return bind(form, packed.parts, dtype, how, prefix, kernels.few, most)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the scales of activations of `dtype`."""
    return torch.float32 if dtype == torch.float16 else dtype


def linear(
    backend: Backend, packed: Packed, form: PackedLayout | None, how: Activations | None, x: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute `backend.linear` and add the bias, with the fastest kernel available."""
    if how is not None and x.is_cpu:
        kernel = prepared(backend, packed, form, how, x.dtype, "")
        y = None if kernel is None else kernel(x.contiguous(), {**packed.parts, "bias": bias})
        if y is not None:
            return y
    beside = x.device == packed.device and x.numel()
    if how is not None and form is not None and beside and _by_launches(backend, packed, form, how, x.dtype):
        return _launched(form, packed.parts, how, x, bias)
    y = as_floats(backend, packed, form, x, bias=bias)
    if y is not None:
        return y
    y = backend.linear(packed, x)
    return y if bias is None else y + bias


def convolution(
    backend: Backend,
    packed: Packed,
    form: PackedLayout | None,
    how: Activations | None,
    x: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
) -> Tensor:
    """Compute `backend.convolve` and add the bias, with the fastest kernel available."""
    y = convolve(backend, packed, form, how, x, bias, geometry)
    if y is not None:
        return y
    y = as_floats(backend, packed, form, x, geometry=geometry)
    y = backend.convolve(packed, x, geometry) if y is None else y
    return y if bias is None else y + bias.view(-1, *[1] * len(geometry.stride))


def convolve(
    backend: Backend,
    packed: Packed,
    form: PackedLayout | None,
    how: Activations | None,
    x: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
) -> Tensor | None:
    """Compute `backend.convolve` and add the bias with the C kernels, or Triton's; None if they do not support it."""
    shape = packed.spec.shape
    plain = geometry.groups == 1 and not isinstance(geometry.padding, str)
    if not plain or len(shape) != 4 or x.ndim != 4 or x.shape[1] != shape[1] or not x.numel():
        return None
    if form is None or how is None or coding(form, how) is None:
        return None
    if not x.is_cpu:
        beside = x.device == packed.device and _by_launches(backend, packed, form, how, x.dtype)
        return scheme_convolutions.convolve(form, packed.parts, how, shape[2:], x, bias, geometry) if beside else None
    if not _by_c(backend, packed, form, how, x.dtype):
        return None
    return _convolved(packed, form, how, x, bias, geometry)


def as_floats(
    backend: Backend, packed: Packed, form: PackedLayout | None, x: Tensor, *, bias: Tensor | None = None,
    geometry: Geometry | None = None,
) -> Tensor | None:  # fmt: skip
    """Compute `backend.linear` and add the bias or, with `geometry`, `backend.convolve`, if that is a float product;
    else None."""
    if (
        form is None
        or x.device.type not in ("cpu", "cuda")
        or dispatch.way(backend, packed, form, x.dtype).reader is None
    ):
        return None
    operands = backend.as_floats(packed, x)
    if operands is None:
        return None
    of_codes = _bare(form) if operands.scales else form
    if operands.scales and dispatch.way(backend, packed, of_codes, operands.x.dtype).reader is None:
        return None
    if geometry is None:
        y = dispatch.linear(backend, packed, of_codes, operands.x, None)
        if len(operands.scales) == 2:  # of rows of x, and of outputs
            kernels, (of_x, of_weight) = imports.scaling(x.device), operands.scales
            if kernels is not None and of_x.numel() * y.shape[-1] == y.numel() and of_weight.numel() == y.shape[-1]:
                of_bias = None if bias is None else bias.to(x.dtype).contiguous()
                result: Tensor = kernels.scale_results(y, of_x.contiguous(), of_weight.contiguous(), of_bias, x.dtype)
                return result
    else:
        y = dispatch.convolve(backend, packed, of_codes, operands.x, None, geometry)
    for scale in operands.scales:
        y = y.mul_(scale if scale.dtype in torch_dtypes.COMPUTE_DTYPES else scale.float())
    y = y.to(x.dtype)
    return y if bias is None else y + bias


@lru_cache(maxsize=4096)
def _bare(form: PackedLayout) -> PackedLayout:
    """Return the layout of the codes without their scales."""
    return replace(form, scale="")


def _convolved(
    packed: Packed, form: PackedLayout, how: Activations, x: Tensor, bias: Tensor | None, geometry: Geometry
) -> Tensor:
    _, _, high, wide = packed.spec.shape
    places, codes = outputs(x.shape[2:], (high, wide), geometry), coding(form, how)
    assert codes is not None
    known = packed.parts[how.scale].to(native.scale_dtype(x.dtype)).float() if how.scale else None
    return native.convolve_codes(
        form, packed.parts, codes, (high, wide), x, how, known, bias, geometry, (places[0], places[1])
    )


def _by_c(backend: Backend, packed: Packed, form: PackedLayout, how: Activations, dtype: torch.dtype) -> bool:
    """Return whether the C kernels multiply such a weight; they are checked against the backend once per kind."""
    if dtype not in torch_dtypes.COMPUTE_DTYPES or not native.reads(form, packed.parts):
        return False
    key = (_of_any_size(form, how), how, dtype, packed.spec.shape[1:], *[part.dtype for part in packed.parts.values()])
    if key not in _verdicts:
        _verdicts[key] = _right(backend, packed, how, dtype)
    return _verdicts[key]


def _by_launches(backend: Backend, packed: Packed, form: PackedLayout, how: Activations, dtype: torch.dtype) -> bool:
    """Return the same of the Triton kernels, on a GPU."""
    device, shape = packed.device, packed.spec.shape
    if device.type != "cuda" or dtype not in torch_dtypes.COMPUTE_DTYPES or len(shape) not in (2, 4):
        return False
    if form.packing == "uint8" or coding(form, how) is None or imports.scheme_kernels(device) is None:
        return False
    parts = [part.dtype for part in packed.parts.values()]
    key = (_of_any_size(form, how), how, dtype, shape[1:], device, *parts)
    if key not in _verdicts:
        try:
            _verdicts[key] = _right(backend, packed, how, dtype)
        except Exception as error:  # whatever it is: the kernels do not work here, and torch does
            _verdicts[key] = False
            log.warning(
                "The Triton kernels are not used for %s with quantized activations on %s: %s: %s. Using torch instead, "
                "which is slower.",
                packed.spec.scheme, device, type(error).__name__, error,
            )  # fmt: skip
    return _verdicts[key]


def _launched(
    form: PackedLayout, parts: Mapping[str, Tensor], how: Activations, x: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute `Backend.linear` and add the bias with the Triton kernels."""
    kernels: Any = imports.scheme_kernels(x.device)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y: Tensor = kernels.linear(form, parts, how, rows, None if bias is None else bias.to(x.dtype).contiguous())
    return y.view(*x.shape[:-1], form.rows)


def _on_cpu(packed: Packed) -> bool:
    return packed.device.type == "cpu"


@undisturbed
def _right(backend: Backend, packed: Packed, how: Activations, dtype: torch.dtype) -> bool:
    on_cpu = _on_cpu(packed)
    rows, m = (_CHECKED_ROWS, 5) if on_cpu else (_ROWS_OF_TILES, _OF_TILES)
    if backend.by_row(packed) and packed.spec.shape[0] > rows:
        packed = packed_rows.cut(packed, [(0, rows)])
    shape, form = packed.spec.shape, backend.form(packed)
    codes = coding(form, how)
    assert form is not None and codes is not None
    device, same = packed.device, False
    bias = torch.linspace(-1, 1, form.rows, dtype=torch.float32, device=device).to(dtype)
    with torch.inference_mode():
        if len(shape) == 2:
            x = torch.linspace(-3, 3, m * form.columns, dtype=torch.float32, device=device).sin().view(m, form.columns)
            x[1], x[2] = 0, x[2] * 1e-3
            x = x.to(dtype)
            expected = backend.linear(packed, x) + bias
            if on_cpu:
                result = Codes(form, packed.parts, dtype, codes, how, "")(x, {**packed.parts, "bias": bias})
                same = result is not None and torch.equal(result, expected)
            else:
                kernels: Any = imports.scheme_kernels(device)
                same = all(
                    torch.equal(kernels.linear(form, packed.parts, how, x, bias, size), expected)
                    for size in kernels.sizes_of(how, device)
                )
        else:
            side = (2, 3) if on_cpu else (8, 9)
            x = torch.linspace(-3, 3, 2 * shape[1] * math.prod(side), dtype=torch.float32, device=device).sin()
            x = x.view(2, shape[1], *side).to(dtype)
            one, pad = (1, 1), (shape[2] // 2, shape[3] // 2)
            geometry = Geometry(stride=one, padding=pad, dilation=one, groups=1)
            expected = backend.convolve(packed, x, geometry) + bias.view(-1, 1, 1)
            if on_cpu:
                same = torch.equal(_convolved(packed, form, how, x, bias, geometry), expected)
            else:
                kernels = imports.scheme_kernels(device)
                of = form, packed.parts, how, shape[2:], x, bias, geometry
                same = all(
                    torch.equal(scheme_convolutions.convolve(*of, size), expected)
                    for size in kernels.sizes_of(how, device)
                )
    if not same:
        log.warning(
            "The kernels are not used for %s with quantized activations on %s: their results are wrong. Using torch "
            "instead, which is slower.",
            packed.spec.scheme,
            device.type,
        )
    return same

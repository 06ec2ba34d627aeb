"""Products in 8-bit floats with packed weights of any scheme: `compute="fp8"`, on GPUs that support it.

The rows of activations are quantized to float8 e4m3 as they come, each with a scale of its own, and so is each row of
the weight:

    y[m, n] = sum_k x_code[m, k] * w_code[n, k] * x_scale[m] * w_scale[n] + bias[n]

A code is value * (448 / largest), rounded to the nearest e4m3, ties to even; its scale largest / 448, where `largest`
is the largest size in the row. Where the weight's file has one scale for all activations (`core.input_scale`), a code
is value / scale in float32, and what is beyond 448 is 448, as ComfyUI has it.

The product is `torch._scaled_mm` with fast sums, whose error on Hopper and Ada is far below that of the codes; on most
cards its results are bfloat16. Weights that are e4m3 already, with one scale for a row, are taken as they are; all
others are decoded and quantized again at every call, as in `int8`. Convolutions, few rows, and sizes that are no
multiples of 16 are left to the exact product. A weight that Triton's kernels read is quantized from its float32 values
in one pass; another one is decoded to the dtype of the activations first.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import input_scale_of, packed_rows, torch_dtypes
from ..utils.tensors import divided
from .base import Coding, EightBit
from .dispatch_guard import undisturbed
from .hadamard import rotate
from .row_codes import RowCodes
from .row_quantization import scaled_rows
from .triton import imports
from .workspace import scratch

if TYPE_CHECKING:
    from types import ModuleType

    from ..core import Packed, PackedLayout

log = logging.getLogger(__name__)

NAME = "fp8"
LARGEST = 448.0  # of e4m3
MULTIPLE = 16  # of both sides of a weight, for `torch._scaled_mm`
# From how many rows of activations it is used: where a card is no longer busy with reading weights alone. Reckoned from
# the bandwidth and the arithmetic of an H100, not measured.
ROWS, ROWS_AGAIN = 64, 256
_CODES = torch.float8_e4m3fn
_CHECKED_ROWS = 16


def direct(form: PackedLayout | None) -> bool:
    """Return whether the codes of a weight can be multiplied without requantizing it."""
    return (
        form is not None
        and form.by_row
        and form.packing == "float8_e4m3fn"
        and bool(form.scale)
        and form.zero == 0
        and not (form.table or form.nested or form.shift)
    )


def pays(packed: Packed, form: PackedLayout | None, x: Tensor) -> bool:
    """Return whether the product of activations x [..., in] with such a weight is faster in 8-bit floats."""
    if x.device.type != "cuda" or not computes(packed, x):
        return False
    return x.numel() >= least(form) * x.shape[-1] and way(x.device, x.dtype) is not None


def least(form: PackedLayout | None) -> int:
    """Return the number of rows of activations from which 8-bit floats are faster."""
    return ROWS if direct(form) else ROWS_AGAIN


def computes(packed: Packed, x: Tensor) -> bool:
    """Return whether `linear` supports the dtype and the sizes."""
    sizes = packed.spec.shape
    return x.dtype in torch_dtypes.COMPUTE_DTYPES and len(sizes) == 2 and not any(size % MULTIPLE for size in sizes)


def prepared(packed: Packed, form: PackedLayout, dtype: torch.dtype) -> EightBit:
    """Return the product of activations of `dtype` for a reader that prepares it."""
    shape, coding, at_once = packed.spec.shape, None, False
    if len(shape) == 2 and not any(size % MULTIPLE for size in shape) and imports.eight(packed.device) is not None:
        coding = Coding.BY_ROW if direct(form) else Coding.AGAIN
        at_once = coding is Coding.AGAIN and is_quantized_at_once(packed, form)
    of = None if coding is None else way(packed.device, dtype)
    if coding is Coding.BY_ROW:
        scale = packed.parts[form.scale]
        if scale.dtype != torch.float32 or scale.numel() != form.rows or form.factor != 1.0:
            coding = None  # the scales have to be made first
    if of is None:
        coding = None
    return EightBit(least(form), coding, floats=None if of is None else partial(product, of=of), at_once=at_once)


@dataclass(frozen=True)
class Way:
    """How a device multiplies 8-bit floats.

    Attributes:
        dtype: of the results. fast: sums are rounded to fewer bits on their way, as in most uses of float8, and cards
        multiply faster. inside: the bias is added before the results are rounded, and not in a pass of its own.
    """

    dtype: torch.dtype
    fast: bool = True
    inside: bool = True


@cache
def way(device: torch.device, dtype: torch.dtype) -> Way | None:
    """Return the fastest way to results of `dtype` that is right on a device; None, which is logged, if there is none.

    With a scale for each row, many cards give bfloat16 alone.
    """
    why = ""
    for results in dict.fromkeys((dtype, torch.bfloat16)):
        for found in (Way(results), Way(results, inside=False), Way(results, fast=False, inside=False)):
            why = _fault(found, device)
            if not why:
                return found
    log.warning('compute="fp8" has no effect on %s: %s. Products are computed with the float weights.', device, why)
    return None


def _fault(of: Way, device: torch.device) -> str:
    """Return what is wrong with a way on a device, "" for nothing."""
    x = torch.linspace(-3, 3, 32 * 64, dtype=torch.float32, device=device).sin().view(32, 64)
    bias = torch.linspace(-1, 1, 32, dtype=torch.float32, device=device)
    try:
        codes, scale = quantized_rows(x)
        result = product(codes, scale, codes, scale.view(-1), bias, of)
        wide = codes.float() * scale
        right = torch.allclose(result.float(), wide @ wide.T + bias, rtol=2**-7, atol=2**-7)
        return "" if right else "its results are wrong"
    except Exception as error:  # what a device without them raises is not the same everywhere
        return f"{type(error).__name__}: {error}"


def needs_none(packed: Packed, form: PackedLayout | None) -> bool:
    """Return whether `linear` takes the codes of such a weight as they are, or quantizes them in one pass."""
    return direct(form) or is_quantized_at_once(packed, form)


_verdicts: dict[tuple[object, ...], bool] = {}


def is_quantized_at_once(packed: Packed, form: PackedLayout | None) -> bool:
    """Return whether Triton's kernel quantizes such a weight in one pass; it is checked against torch at the first of a
    kind."""
    kernels = imports.eight(packed.device)
    if form is None or kernels is None or not kernels.quantizes(form):
        return False
    key = (replace(form, rows=0), packed.device, *[part.dtype for part in packed.parts.values()])
    if key not in _verdicts:
        _verdicts[key] = _is_right(kernels, packed)
    return _verdicts[key]


@undisturbed
def _is_right(kernels: ModuleType, packed: Packed) -> bool:
    codec = packed.spec.scheme.codec
    if codec.by_row(packed):
        packed = packed_rows.cut(packed, [(0, min(packed.spec.shape[0], _CHECKED_ROWS))])
    try:
        codes, scale = kernels.quantize_weight(codec.form(packed), packed.parts, _CODES)
    except Exception as error:  # whatever it is: the kernel does not work here, and two others do
        log.debug("A weight is decoded before it is quantized to float8: %s: %s", type(error).__name__, error)
        return False
    values, scales = scaled_rows(codec.decode(packed, torch.float32), LARGEST)
    reference = torch.empty_like(codes).copy_(values)
    return torch.equal(codes.view(torch.uint8), reference.view(torch.uint8)) and torch.equal(scale, scales.view(-1))


def rotates(packed: Packed, form: PackedLayout | None, x: Tensor, rotation: int) -> bool:
    """Return whether `linear` rotates activations itself, in float32 and without rounding before they are quantized."""
    return pays(packed, form, x) and imports.rotation(x.device, rotation) is not None


def linear(
    packed: Packed, form: PackedLayout | None, weight: Tensor | None, x: Tensor, bias: Tensor | None, rotation: int = 0
) -> Tensor:
    """Multiply x [..., in] by the transposed weight and add the bias: [..., out] in x's dtype.

    Args:
        weight: the float weight [out, in]; None if `needs_none`.
        rotation: how many columns of x are to be rotated together; only where it `rotates`.
    """
    rows, columns = packed.spec.shape
    flat = x.reshape(-1, columns)
    static = input_scale_of(packed)
    x_codes, x_scale = quantized_rows(flat, rotation=rotation) if static is None else _quantized_by(static, flat)
    if weight is None and not direct(form):
        kernels = imports.eight(x.device)
        assert kernels is not None and form is not None  # `needs_none` said so
        codes, scale = kernels.quantize_weight(form, packed.parts, _CODES)
    elif weight is None:
        assert form is not None
        codes = packed.parts[form.codes].view(_CODES).view(rows, columns)
        scale = RowCodes(codes, packed.parts[form.scale], form.factor).scales()
    else:
        codes, of_rows = quantized_rows(weight, scratch((rows, columns), _CODES, x.device))
        scale = of_rows.view(-1)
    of = way(x.device, x.dtype)
    assert of is not None  # `pays` said so
    return product(x_codes, x_scale, codes, scale, bias, of).to(x.dtype).view(*x.shape[:-1], rows)


def quantized_rows(x: Tensor, out: Tensor | None = None, rotation: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize rows x [m, k] of any float dtype to codes, e4m3 [m, k], and scales, float32 [m, 1]; see the module.
    With `rotation` so many columns are rotated together before.

    A row that is not finite gets a scale that is not.
    """
    codes = torch.empty(x.shape, dtype=_CODES, device=x.device) if out is None else out
    kernels = imports.eight(x.device) if x.is_cuda else None
    if kernels is not None:
        scale = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
        kernels.quantization(x if x.stride(1) == 1 else x.contiguous(), codes, scale, None, rotation)(x.device)
        return codes, scale
    values, scale = scaled_rows(rotate(x.float(), rotation) if rotation else x, LARGEST)
    return codes.copy_(values), scale


def _quantized_by(scale: float, x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows by one scale that is known before; see `quantized_rows`."""
    codes = divided(x.float(), scale).clamp_(-LARGEST, LARGEST).to(_CODES)
    return codes, torch.full((len(x), 1), scale, dtype=torch.float32, device=x.device)


def product(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, of: Way) -> Tensor:
    """Multiply codes x [m, k] by the transpose of weight [n, k] and by scales [m, 1] and [n], and add a bias [n]."""
    inside = bias.to(of.dtype) if bias is not None and of.inside else None
    done: Tensor = torch._scaled_mm(
        x, weight.T, x_scale, scale.view(1, -1), bias=inside, out_dtype=of.dtype, use_fast_accum=of.fast
    )
    return done if bias is None or of.inside else done.add_(bias)

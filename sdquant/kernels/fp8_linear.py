"""Products in 8-bit floats with packed weights of any scheme: `compute="fp8"`, on GPUs that support it.

The rows of activations are quantized to float8 e4m3 as they come, each with a scale of its own, and so is each row of
the weight:

    y[m, n] = sum_k x_code[m, k] * w_code[n, k] * x_scale[m] * w_scale[n] + bias[n]

A code is value * (448 / largest), rounded to the nearest e4m3, ties to even; its scale largest / 448, where `largest`
is the largest size in the row. The product is `torch._scaled_mm`, in bfloat16 on a card. Weights that are e4m3 already,
with one scale for a row, are taken as they are; all others are decoded and quantized again at every call, as in `int8`.
Convolutions, few rows, and sizes that are no multiples of 16 are left to the exact product.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.torch_dtypes import COMPUTE_DTYPES
from .base import Coding, EightBit
from .int8_reference import scaled_rows
from .row_codes import spread
from .triton import imports
from .workspace import scratch

if TYPE_CHECKING:
    from ..core.backend import Packed
    from ..core.packed_layout import PackedLayout

log = logging.getLogger(__name__)

NAME = "fp8"
LARGEST = 448.0  # of e4m3
MULTIPLE = 16  # of both sides of a weight, for `torch._scaled_mm`
# From how many rows of activations it is used: where a card is no longer busy with reading weights alone. Reckoned from
# the bandwidth and the arithmetic of an H100, not measured.
ROWS, ROWS_AGAIN = 64, 256
_CODES = torch.float8_e4m3fn


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
    return x.numel() >= least(form) * x.shape[-1] and works_on(x.device)


def least(form: PackedLayout | None) -> int:
    """Return the number of rows of activations from which 8-bit floats are faster."""
    return ROWS if direct(form) else ROWS_AGAIN


def computes(packed: Packed, x: Tensor) -> bool:
    """Return whether `linear` supports the dtype and the sizes."""
    sizes = packed.spec.shape
    return x.dtype in COMPUTE_DTYPES and len(sizes) == 2 and not any(size % MULTIPLE for size in sizes)


def prepared(packed: Packed, form: PackedLayout, dtype: torch.dtype) -> EightBit:
    """Return the product of activations of `dtype` for a reader that prepares it."""
    # With a scale for each row, cards put out bfloat16 alone.
    fits = dtype == torch.bfloat16 and len(packed.spec.shape) == 2 and not any(n % MULTIPLE for n in packed.spec.shape)
    coding = None
    if fits and works_on(packed.device) and imports.eight(packed.device) is not None:
        coding = Coding.BY_ROW if direct(form) else Coding.AGAIN
    if coding is Coding.BY_ROW:
        scale = packed.parts[form.scale]
        if scale.dtype != torch.float32 or scale.numel() != form.rows or form.factor != 1.0:
            coding = None
    return EightBit(least(form), coding, floats=True)


@cache
def works_on(device: torch.device) -> bool:
    """Return whether a device multiplies 8-bit floats correctly; checked once. A reason against it is logged."""
    x = torch.linspace(-3, 3, 32 * 64, dtype=torch.float32, device=device).sin().view(32, 64)
    why = "its results are wrong"
    try:
        codes, scale = quantized_rows(x)
        result = product(codes, scale, codes, scale.view(-1), torch.bfloat16).float()
        wide = codes.float() * scale
        if torch.allclose(result, wide @ wide.T, rtol=2**-7, atol=1e-3):
            return True
    except Exception as error:  # what a device without them raises is not the same everywhere
        why = f"{type(error).__name__}: {error}"
    log.warning('compute="fp8" has no effect on %s: %s. Products are computed with the float weights.', device, why)
    return False


def linear(packed: Packed, form: PackedLayout | None, weight: Tensor | None, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., in] by the transposed weight and add the bias: [..., out] in x's dtype.

    Args:
        weight: the float weight [out, in]; None if the codes are multiplied without requantizing.
    """
    rows, columns = packed.spec.shape
    flat = x.reshape(-1, columns)
    x_codes, x_scale = quantized_rows(flat)
    if weight is None:
        assert form is not None
        codes = packed.parts[form.codes].view(_CODES).view(rows, columns)
        scale = spread(packed.parts[form.scale].flatten().float() * form.factor, rows)
    else:
        codes, of_rows = quantized_rows(weight, scratch((rows, columns), _CODES, x.device))
        scale = of_rows.view(-1)
    # With a scale for each row, cards put out bfloat16 alone.
    y = product(x_codes, x_scale, codes, scale, torch.bfloat16 if x.is_cuda else x.dtype).to(x.dtype)
    return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], rows)


def quantized_rows(x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows x [m, k] of any float dtype to codes, e4m3 [m, k], and scales, float32 [m, 1]; see the module.

    A row that is not finite gets a scale that is not.
    """
    codes = torch.empty(x.shape, dtype=_CODES, device=x.device) if out is None else out
    kernels = imports.eight(x.device) if x.is_cuda else None
    if kernels is not None:
        scale = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
        kernels.quantization(x if x.stride(1) == 1 else x.contiguous(), codes, scale, None)(x.device)
        return codes, scale
    values, scale = scaled_rows(x, LARGEST)
    return codes.copy_(values), scale


def product(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply codes x [m, k] by the transpose of weight [n, k] and by scales [m, 1] and [n]: [m, n] of `dtype`."""
    done: Tensor = torch._scaled_mm(x, weight.T, scale_a=x_scale, scale_b=scale.view(1, -1), out_dtype=dtype)
    return done

"""Products of weights in blocks of small floats with activations quantized alike: `compute="fp4"` for NVFP4 weights
(W4A4), and `compute="fp8"` for MXFP8 weights (W8A8) where the card multiplies blocks with their scales.

    y[m, n] = sum_b sum_(k in b) x_code[m, k] * w_code[n, k] * x_scale[m, b] * w_scale[n, b] * factors + bias[n]

Activations are quantized as they come, as `block_floats` says; NVFP4's scales have one factor for the whole tensor. On
NVIDIA's cards from compute capability 10.0 the product is torch's `scaled_mm`, once it has been found right there.
Elsewhere NVFP4 activations are rounded and multiplied as floats with the decoded weight: the same numbers but for the
order and rounding of sums, and slower than without. Few rows are left to the exact product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import FACTOR, Packed, code_tables, dtype_name, torch_dtypes
from . import block_floats
from .block_floats import MXFP8, NVFP4

if TYPE_CHECKING:
    from ..core import PackedLayout

log = logging.getLogger(__name__)

FP4, FP8 = "fp4", "fp8"
# From how many rows of activations it is used: as `fp8_linear.ROWS`, reckoned and not measured.
ROWS = 64
_BLACKWELL = (10, 0)
_MULTIPLE = 32  # of the sizes of what `scaled_mm` multiplies
# Packing, table and group of a weight's layout, and the dtype of its scales.
_NVFP4 = ("nibbles-low", "e2m1", NVFP4, "float8_e4m3fn")
_MXFP8 = ("float8_e4m3fn", "", MXFP8, "float8_e8m0fnu")

# Codes, the scales of their blocks, and the factor of these.
Operand = tuple[Tensor, Tensor, "Tensor | None"]


@dataclass(frozen=True)
class Way:
    """How a device multiplies: the dtype of results, and whether the bias is added before they are rounded."""

    dtype: torch.dtype
    inside: bool = True


def block_of(packed: Packed, form: PackedLayout | None, compute: str | None, dtype: torch.dtype) -> int:
    """Return the size of the blocks in which products with a weight are computed (NVFP4 or MXFP8); 0 for none."""
    if form is None or compute not in (FP4, FP8) or len(packed.spec.shape) != 2 or form.taps > 1:
        return 0
    if dtype not in torch_dtypes.COMPUTE_DTYPES or not form.scale or form.zero != 0 or form.nested or form.shift:
        return 0
    stored = (form.packing, form.table, form.group, dtype_name(packed.parts[form.scale].dtype))
    if compute == FP4:
        return NVFP4 if stored == _NVFP4 else 0
    return MXFP8 if stored == _MXFP8 and _way_for(packed, MXFP8, dtype) is not None else 0


def has_enough_rows(x: Tensor) -> bool:
    """Return whether activations x [..., in] are quantized: few rows are computed exactly, which is as fast."""
    return x.numel() >= ROWS * x.shape[-1] > 0


def linear(
    block: int, packed: Packed, form: PackedLayout, x: Tensor, bias: Tensor | None, exact: Callable[[Tensor], Tensor]
) -> Tensor:
    """Multiply x [..., in] by the transposed weight and add the bias: [..., out] in x's dtype.

    Args:
        block: as `block_of` says. exact: the product of float activations with the decoded weight, without a bias.
    """
    flat = x.reshape(-1, x.shape[-1])
    way = _way_for(packed, block, x.dtype)
    if way is not None:
        return _multiplied(block, packed, form, flat, bias, way).to(x.dtype).view(*x.shape[:-1], form.rows)
    values, factor = rounded(block, flat)
    if factor is not None:
        # Its power of two goes with the values, so that no sum is too large for float16. What is left is from 1 to 2:
        # with less, values and sums would be larger than x and the product.
        factor, exponent = torch.frexp(factor)
        factor, values = factor * 2, torch.ldexp(values, exponent - 1)
    y = exact(values.to(x.dtype).view(x.shape))  # a code times its scale has six bits: exact in every dtype
    y = y if factor is None else (y * factor).to(x.dtype)
    return y if bias is None else y + bias


def rounded(block: int, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return x [m, k] as its codes stand for it: float32 [m, k] but for the factor of all scales, and that."""
    if block == MXFP8:
        codes, scale = block_floats.mxfp8(x)
        steps = (scale.view(torch.uint8).int() << 23).view(torch.float32)  # 0 for exponent 0
        return codes.float() * steps.repeat_interleave(MXFP8, 1)[:, : x.shape[1]], None
    factor = block_floats.factor_of(x.abs().amax())
    codes, scale = block_floats.nvfp4(x, factor)
    table = code_tables.code_table("e2m1", "float32", x.device)
    values = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    values = table.index_select(0, values.reshape(-1).int()).view(values.shape)
    return (values * scale.float().repeat_interleave(NVFP4, 1))[:, : x.shape[1]], factor


def _multiplied(block: int, packed: Packed, form: PackedLayout, x: Tensor, bias: Tensor | None, way: Way) -> Tensor:
    """Return the product by `scaled_mm`, [m, rows] in `way.dtype`."""
    codes, scale, m = packed.parts[form.codes], packed.parts[form.scale], len(x)
    x = F.pad(x, (0, 0, 0, -len(x) % _MULTIPLE)) if len(x) % _MULTIPLE else x
    if block == MXFP8:
        x_codes, x_scale = block_floats.mxfp8(x)
        operands: list[Operand] = [(x_codes, x_scale, None), (codes.view(form.rows, form.columns), scale, None)]
    else:
        factor = block_floats.factor_of(x.abs().amax())
        x_codes, x_scale = block_floats.nvfp4(x, factor)
        of_weight = torch.full((), packed.spec.details[FACTOR], dtype=torch.float32, device=x.device)
        operands = [(x_codes, x_scale, factor), (codes.view(form.rows, form.columns // 2), scale, of_weight)]
    return _scaled_mm(block, operands, bias, way)[:m]


def _scaled_mm(
    block: int, operands: list[tuple[Tensor, Tensor, Tensor | None]], bias: Tensor | None, way: Way
) -> Tensor:
    functional: Any = F
    kinds, swizzles = functional.ScalingType, functional.SwizzleType
    (a, b), scales = [codes if block == MXFP8 else codes.view(torch.float4_e2m1fn_x2) for codes, _, _ in operands], []
    for _, scale, factor in operands:
        tiles = block_floats.tiled(scale).view(scale.dtype).view(-1)
        scales.append([tiles] if factor is None else [tiles, factor])
    recipe = [kinds.BlockWise1x32] if block == MXFP8 else [kinds.BlockWise1x16, kinds.TensorWise]
    order = [swizzles.SWIZZLE_32_4_4, swizzles.NO_SWIZZLE][: len(recipe)]
    y: Tensor = functional.scaled_mm(
        a, b.t(), scale_a=scales[0], scale_recipe_a=recipe, scale_b=scales[1], scale_recipe_b=recipe, swizzle_a=order,
        swizzle_b=order, bias=None if bias is None or not way.inside else bias.to(way.dtype), output_dtype=way.dtype,
    )  # fmt: skip
    return y if bias is None or way.inside else y + bias


def _way_for(packed: Packed, block: int, dtype: torch.dtype) -> Way | None:
    fits = not any(size % _MULTIPLE for size in packed.spec.shape)
    return sound_way(packed.device, block, dtype) if fits else None


@cache
def sound_way(device: torch.device, block: int, dtype: torch.dtype) -> Way | None:
    """Return the fastest way to results of `dtype` that is right on a device; None if there is none."""
    if device.type != "cuda" or torch.version.hip is not None or not hasattr(F, "scaled_mm"):
        return None
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) < _BLACKWELL:
        return None
    why = ""
    for results in dict.fromkeys((dtype, torch.bfloat16)):
        for candidate in (Way(results), Way(results, inside=False)):
            why = fault(candidate, block, device)
            if not why:
                return candidate
    log.warning("Blocks of %d small floats are multiplied as floats on %s: %s.", block, device, why)
    return None


def fault(of: Way, block: int, device: torch.device) -> str:
    """Return what is wrong with a way on a device, "" for nothing."""
    x = torch.linspace(-3, 3, 64 * 128, dtype=torch.float32, device=device).sin().view(64, 128)
    bias = torch.linspace(-1, 1, 64, dtype=torch.float32, device=device)
    try:
        values, factor = rounded(block, x)
        if block == MXFP8:
            operand: Operand = (*block_floats.mxfp8(x), None)
        else:
            assert factor is not None
            operand, values = (*block_floats.nvfp4(x, factor), factor), values * factor
        result = _scaled_mm(block, [operand, operand], bias, of)
        right = torch.allclose(result.float(), values @ values.T + bias, rtol=2**-7, atol=2**-7)
        return "" if right else "its results are wrong"
    except Exception as error:  # what a device without them raises is not the same everywhere
        return f"{type(error).__name__}: {error}"

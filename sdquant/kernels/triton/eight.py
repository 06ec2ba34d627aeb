"""Products of 8-bit codes on GPUs: activations to codes in one launch, and the scales in another.

The product between them is torch's own (`torch._int_mm`, `torch._scaled_mm`), which no kernel here would beat. In plain
torch the two are some ten launches, each of which reads and writes the activations.

    codes, scale = quantize_rows(x, torch.int8)          absmax / 127 of each row
    y = finish(torch._int_mm(codes, w.t()), scale, w_scale, bias, x.dtype)

Reached by `library.launcher().eight`, so that nothing imports triton by accident.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from .activations import finish_kernel, quantize_kernel
from .running import EXACT, INTERPRETED, Launch, name_of

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows of x [m, k], contiguous and of any float dtype, as codes [m, k] of `dtype` (int8 or float8_e4m3fn) and
    scales, float32 [m, 1].

    In torch: scale = x.float().abs().amax(1, keepdim=True) / largest; codes = (x.float() / scale), to the nearest code,
    halves to even. A row of zeros has scale 0 and codes of 0; NaN in a row makes its scale NaN.
    """
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    if x.numel():
        quantization(x, codes, scale)(x.device)
    return codes, scale


def quantization(x: Tensor, codes: Tensor, scale: Tensor) -> Launch:
    """The launch of `quantize_rows`."""
    float8 = codes.dtype != torch.int8
    arguments = {
        "x": x,
        "codes": codes.view(torch.uint8) if float8 else codes,
        "scale": scale,
        "columns": x.shape[1],
        "LARGEST": LARGEST[codes.dtype],
        "FLOAT8": float8,
        "BLOCK": min(4096, triton.next_power_of_2(x.shape[1])),
    }
    return Launch(quantize_kernel, (x.shape[0],), arguments, {"num_warps": 8 if x.shape[1] >= 2048 else 4, **EXACT})


def finish(product: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """product [m, n] (int32 or float) * row_scale [m or m, 1] * column_scale [n] + bias [n], in float32, as `dtype`."""
    out = torch.empty(product.shape, dtype=dtype, device=product.device)
    if out.numel():
        finishing(product, row_scale, column_scale, bias, out)(out.device)
    return out


def finishing(product: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, out: Tensor) -> Launch:
    """The launch of `finish`."""
    rows, columns = product.shape
    tall, wide = (1, 1024) if rows == 1 else (8, 256)
    arguments = {
        "product": product,
        "out": out,
        "row_scale": row_scale,
        "column_scale": column_scale,
        "bias": out if bias is None else bias,
        "rows": rows,
        "columns": columns,
        "BIASED": bias is not None,
        "OUT": name_of(out.dtype),
        "BITS": INTERPRETED,
        "BLOCK_M": tall,
        "BLOCK_N": wide,
    }
    grid = (math.ceil(rows / tall), math.ceil(columns / wide))
    return Launch(finish_kernel, grid, arguments, {"num_warps": 4, **EXACT})

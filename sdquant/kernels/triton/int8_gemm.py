"""Products of 8-bit codes on GPUs: activations are quantized in one launch, and the epilogue is another.

The GEMM between them is torch's own (`torch._int_mm`, `torch._scaled_mm`), which no kernel here would beat. In plain
torch the two steps are some ten launches, each of which reads and writes the activations.

    codes, scale, sums = quantize_rows(x)
    w_codes, w_scale = quantize_weight(form, parts)      or the weight's own codes
    y = finish(torch._int_mm(codes, w_codes.t()), scale, w_scale, bias, x.dtype)

Where a row of the weight has several scales it is one launch, product and all: `product_by_run`.

The numbers are those of `int8_linear`, bit for bit: codes are round(value * (127 / largest)), ties to even, in
float32. Reached by `imports.eight`, so that nothing imports triton by accident.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from ...core.dtypes import dtype_name
from ...utils.tensors import divided
from .activations import again_kernel, finish_kernel, quantize_kernel, runs_kernel
from .launch import multiplies
from .launch_config import EXACT, INTERPRETED, Launch, plan_of, pointers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...core.packed_layout import PackedLayout

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_rows(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the rows of x [m, k], contiguous and of any float dtype.

    Returns:
        codes [m, k] of `dtype` (int8 or float8_e4m3fn); scales, float32 [m, 1]; the sum of each row's codes, int32
        [m, 1], only for int8. A row that is not finite gets a scale that is not.
    """
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    sums = torch.empty((x.shape[0], 1), dtype=torch.int32, device=x.device)
    if x.numel():
        quantization(x, codes, scale, sums)(x.device)
    return codes, scale, sums


def quantization(x: Tensor, codes: Tensor, scale: Tensor, sums: Tensor) -> Launch:
    """Return the launch of `quantize_rows`."""
    float8 = codes.dtype != torch.int8
    arguments = {
        "x": x,
        "codes": codes.view(torch.uint8) if float8 else codes,
        "scale": scale,
        "sums": sums,
        "columns": x.shape[1],
        "LARGEST": LARGEST[codes.dtype],
        "FLOAT8": float8,
        "BLOCK": min(4096, triton.next_power_of_2(x.shape[1])),
    }
    return Launch(quantize_kernel, (x.shape[0],), arguments, {"num_warps": 8 if x.shape[1] >= 2048 else 4, **EXACT})


def quantize_weight(form: PackedLayout, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Requantize a packed weight, as its float32 values, to int8 codes [rows, columns] and scales, float32 [rows].

    Only for forms that `quantizes` accepts.
    """
    device = parts[form.codes].device
    codes = torch.empty((form.rows, form.columns), dtype=torch.int8, device=device)
    scale = torch.empty(form.rows, dtype=torch.float32, device=device)
    requantization(form, parts, codes, scale)(device)
    return codes, scale


def quantizes(form: PackedLayout) -> bool:
    """Return whether there is a kernel that requantizes such weights."""
    return multiplies(form)


def requantization(form: PackedLayout, parts: Mapping[str, Tensor], codes: Tensor, scale: Tensor) -> Launch:
    """Return the launch of `quantize_weight`."""
    plan = plan_of(form)
    arguments = {
        "out": codes,
        "out_scale": scale,
        "per_row": form.columns // plan.block.weights,
        "columns": form.columns,
        **pointers(form, parts, plan.block),
        **plan.numbers,
        **plan.compiled,
        "BLOCK_C": 512 // plan.block.lanes,
    }
    return Launch(again_kernel, (form.rows,), arguments, {"num_warps": 4, **EXACT})


def finish(
    product: Tensor,
    row_scale: Tensor,
    column_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    sums: Tensor | None = None,
    added: Tensor | int = 0,
) -> Tensor:
    """Return (product [m, n] + sums [m] * added [n]) * row_scale [m] * column_scale [n] + bias [n] as `dtype`.

    Args:
        product: int32, contiguous. row_scale, sums: may have a second dimension of 1.
        added: number to add to each code of the weight (minus the zero point), int32 [n], or one for all.
    """
    out = torch.empty(product.shape, dtype=dtype, device=product.device)
    if out.numel():
        finishing(product, row_scale, column_scale, bias, out, sums, added)(out.device)
    return out


def finishing(
    product: Tensor,
    row_scale: Tensor,
    column_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor | None = None,
    added: Tensor | int = 0,
) -> Launch:
    """Return the launch of `finish`; `out` may be some columns of a wider tensor."""
    rows, columns = product.shape
    tall, wide = (1, 1024) if rows == 1 else (8, 256)
    each = isinstance(added, Tensor)
    arguments = {
        "product": product,
        "out": out,
        "row_scale": row_scale,
        "column_scale": column_scale,
        "bias": out if bias is None else bias,
        "sums": product if sums is None else sums,
        "added": added if isinstance(added, Tensor) else product,
        "rows": rows,
        "columns": columns,
        "out_columns": out.stride(0),
        "number": 0 if isinstance(added, Tensor) else added,
        "BIASED": bias is not None,
        "ADDED": "" if sums is None else "each" if each else "number" if added else "",
        "OUT": dtype_name(out.dtype),
        "BITS": INTERPRETED,
        "BLOCK_M": tall,
        "BLOCK_N": wide,
    }
    grid = (math.ceil(rows / tall), math.ceil(columns / wide))
    return Launch(finish_kernel, grid, arguments, {"num_warps": 4, **EXACT})


def product_by_run(
    codes: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor, bias: Tensor | None, out: Tensor
) -> Launch:
    """Return the launch of a product with several scales per row, from codes to results.

    Args:
        codes, weight: int8 [m, columns] and [rows, columns], contiguous. row_scale: float32 [m, 1], of the codes.
        scale: float32 [rows, groups, taps], contiguous, of columns [groups, columns / groups / taps, taps].
        out: [m, rows]; may be some columns of a wider tensor.
    """
    (m, columns), (rows, groups, taps) = codes.shape, scale.shape
    each = columns // groups // taps
    tall, wide = 64 if m <= 64 else 128, 128
    arguments = {
        "x": codes,
        "weight": weight,
        "scale": scale,
        "row_scale": row_scale,
        "bias": out if bias is None else bias,
        "out": out,
        "m_rows": m,
        "rows": rows,
        "columns": columns,
        "out_columns": out.stride(0),
        "groups": groups,
        "each": each,
        "taps": taps,
        "BIASED": bias is not None,
        "OUT": dtype_name(out.dtype),
        "BITS": INTERPRETED,
        "BLOCK_M": tall,
        "BLOCK_N": wide,
        "BLOCK_K": 64,
    }
    grid = (math.ceil(rows / wide), math.ceil(m / tall))
    return Launch(runs_kernel, grid, arguments, {"num_warps": 8, "num_stages": 3, **EXACT})


def sound(device: torch.device) -> bool:
    """Return whether all kernels give torch's numbers on this device; checked once, before they are used."""
    x = torch.linspace(-3, 3, 5 * 96, dtype=torch.float32, device=device).view(5, 96).to(torch.bfloat16)
    x[1] = 0
    codes, scale, sums = quantize_rows(x)
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    target = wide.mul(largest.new_full((), 127.0).div(largest).masked_fill_(largest == 0, 0.0)).round_().to(torch.int8)
    product = torch.arange(-200, 200, device=device, dtype=torch.int32).view(5, 80) * 9973
    column = torch.linspace(0.01, 0.02, 80, dtype=torch.float32, device=device)
    bias = torch.linspace(-1, 1, 80, dtype=torch.float32, device=device).to(torch.bfloat16)
    added = torch.arange(80, device=device, dtype=torch.int32)
    result = finish(product, scale, column, bias, torch.bfloat16, sums, added)
    total = product + codes.sum(1, keepdim=True, dtype=torch.int32) * added
    by_torch = total.float().mul_(scale).mul_(column).add_(bias).to(torch.bfloat16)
    runs = torch.empty_like(result)
    of_runs = torch.linspace(0.01, 0.02, 160, dtype=torch.float32, device=device).view(80, 2, 1)
    weight = torch.arange(80 * 128, device=device).view(80, 128).to(torch.int8)
    left = torch.arange(5 * 128, device=device).view(5, 128).mul(7).to(torch.int8)
    product_by_run(left, weight, of_runs, scale, bias, runs)(device)
    # Sums of integers below 2 ** 24 are exact in float32, in whatever order.
    parts = [left[:, i : i + 64].float() @ weight[:, i : i + 64].float().t() * of_runs[:, i // 64, 0] for i in (0, 64)]
    return bool(
        torch.equal(runs, (parts[0] + parts[1]).mul(scale).add(bias).to(torch.bfloat16))
        and torch.equal(codes, target)
        and torch.equal(scale, divided(largest, 127.0))
        and torch.equal(result, by_torch)
    )  # the sums are right if `found` is

"""Columns of activations that are multiplied and brought to another order, of weights with `core.input_columns`.

Reached by `imports.gathering`, so that nothing imports triton by accident.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, import-untyped, import-not-found"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import dtype_name
from .decoding import rounded
from .launch_config import EXACT, INTERPRETED, Launch

_HIGH, _WIDE = 4, 256  # of a tile of activations, whose places are loaded once


@triton.jit
def gather_kernel(
    x, out, order, factors, m_rows, columns, ORDERED: tl.constexpr, SCALED: tl.constexpr, OUT: tl.constexpr,
    BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Copy a tile of x [m_rows, columns] from the columns that `order` names, times their `factors`, float32."""
    across = tl.cdiv(columns, BLOCK_K)
    i = tl.program_id(0) // across
    m = i * BLOCK_M + tl.arange(0, BLOCK_M)
    k = (tl.program_id(0) - i * across) * BLOCK_K + tl.arange(0, BLOCK_K)
    there = k < columns
    live = (m < m_rows)[:, None] & there[None, :]
    row = m[:, None].to(tl.int64) * columns
    of = k
    if ORDERED:
        of = tl.load(order + k, mask=there, other=0)
    v = tl.load(x + row + of[None, :], mask=live, other=0.0).to(tl.float32)
    if SCALED:
        v = rounded(v * tl.load(factors + of, mask=there, other=0.0)[None, :], OUT, BITS)
    tl.store(out + row + k[None, :], v.to(out.dtype.element_ty), mask=live)


def gathering(x: Tensor, order: Tensor | None, factors: Tensor | None, out: Tensor) -> Launch:
    """Return the launch that writes (x * factors)[:, order] to `out`, both [m, columns] and contiguous.

    Args:
        order: int32 [columns]. factors: float32 [columns].
    """
    m, columns = x.shape
    arguments = {
        "x": x,
        "out": out,
        "order": out if order is None else order,
        "factors": out if factors is None else factors,
        "m_rows": m,
        "columns": columns,
        "ORDERED": order is not None,
        "SCALED": factors is not None,
        "OUT": dtype_name(out.dtype),
        "BITS": INTERPRETED,
        "BLOCK_M": _HIGH,
        "BLOCK_K": _WIDE,
    }
    grid = (math.ceil(m / _HIGH) * math.ceil(columns / _WIDE),)
    return Launch(gather_kernel, grid, arguments, {"num_warps": 4, **EXACT})


def gather_columns(x: Tensor, order: Tensor | None, factors: Tensor | None) -> Tensor:
    """Return (x * factors)[..., order] for x [..., columns], in its dtype; multiplied in float32."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        columns = x.shape[-1]
        gathering(x.view(-1, columns), order, factors, out.view(-1, columns))(x.device)
    return out


def sound_gathering(device: torch.device) -> bool:
    """Return whether the kernel gives torch's numbers on a device; checked once, before it is used."""
    x = torch.linspace(-9, 9, 7 * 300, dtype=torch.float32, device=device).sin().view(7, 300).to(torch.bfloat16)
    order = torch.arange(300, dtype=torch.int32, device=device).mul(7).remainder(300)
    factors = torch.linspace(0.1, 3, 300, dtype=torch.float32, device=device)
    scaled = (x * factors).to(x.dtype)
    of_both = gather_columns(x, order, factors), scaled.index_select(1, order)
    alone = (gather_columns(x, order, None), x.index_select(1, order)), (gather_columns(x, None, factors), scaled)
    return all(torch.equal(one, other) for one, other in (of_both, *alone))

"""The last step of a float product of codes: its scales and the bias, in one launch.

Every step is rounded as torch rounds it. Reached by `imports.scaling`.
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

_HIGH, _WIDE = 8, 256  # of a tile of results


@triton.jit
def scaling_kernel(
    y, out, row_scale, scale, bias, m_rows, rows, BIASED: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of y [m_rows, rows] by the scales of its rows and columns, in IN; round to OUT, add the bias."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_there, n_there = m < m_rows, n < rows
    at, live = m[:, None].to(tl.int64) * rows + n[None, :], m_there[:, None] & n_there[None, :]
    v = tl.load(y + at, mask=live, other=0.0).to(tl.float32)
    v = rounded(v * tl.load(row_scale + m, mask=m_there, other=0.0).to(tl.float32)[:, None], IN, BITS)
    v = rounded(v * tl.load(scale + n, mask=n_there, other=0.0).to(tl.float32)[None, :], IN, BITS)
    v = rounded(v, OUT, BITS)
    if BIASED:
        v = rounded(v + tl.load(bias + n, mask=n_there, other=0.0).to(tl.float32)[None, :], OUT, BITS)
    tl.store(out + at, v.to(out.dtype.element_ty), mask=live)


def scaling(y: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> Launch:
    """Return the launch that scales y [m, rows] by [m] and [rows] and adds a bias [rows], into `out` [m, rows]; all
    contiguous."""
    m, rows = y.shape
    arguments = {
        "y": y,
        "out": out,
        "row_scale": row_scale,
        "scale": scale,
        "bias": out if bias is None else bias,
        "m_rows": m,
        "rows": rows,
        "BIASED": bias is not None,
        "IN": dtype_name(y.dtype),
        "OUT": dtype_name(out.dtype),
        "BITS": INTERPRETED,
        "BLOCK_M": _HIGH,
        "BLOCK_N": _WIDE,
    }
    return Launch(scaling_kernel, (math.ceil(m / _HIGH), math.ceil(rows / _WIDE)), arguments, {"num_warps": 4, **EXACT})


def scale_results(y: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the results of `scaling` for y [..., rows], in a dtype."""
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    scaling(y.view(-1, y.shape[-1]), row_scale, scale, bias, out.view(-1, y.shape[-1]))(y.device)
    return out


def by_torch(y: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the same, step by step; `y` is overwritten."""
    y = y.mul_(row_scale.view(*y.shape[:-1], 1)).mul_(scale).to(dtype)
    return y if bias is None else y + bias


def sound_scaling(device: torch.device) -> bool:
    """Return whether the kernel gives torch's numbers on a device; checked once, before it is used."""
    wave = torch.linspace(-9, 9, 11 * 300, dtype=torch.float32, device=device).sin()
    for dtype, to in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)):
        y, scales = wave.view(11, 300).to(dtype), wave.abs().add(0.1).to(dtype)
        of = scales[:11], scales[11:311], wave[:300].to(to), to
        if not torch.equal(scale_results(y, *of), by_torch(y.clone(), *of)):
            return False
    return True

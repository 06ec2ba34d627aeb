"""GEMM of float8 codes: torch's float8 kernel on GPUs that have one, else float32."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

LEAST_CAPABILITY = (8, 9)  # Ada and Hopper are the first with float8 products
MULTIPLE = 16  # of what `torch._scaled_mm` takes
TOLERANCE = 1e-3  # of the largest sum: cards add float8 products with fewer bits than float32 has


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply float8 codes left [M, K] by right [N, K] transposed: float32 [M, N]."""
    if left.is_cuda and _has_kernel(left.device.index or 0, left.dtype, right.dtype):
        return by_kernel(left, right)
    with torch.autocast(left.device.type, enabled=False):
        return left.float() @ right.float().T


def by_kernel(left: Tensor, right: Tensor) -> Tensor:
    """Do the same with `torch._scaled_mm`, with the slower and more exact accumulation."""
    (rows, inner), columns = left.shape, right.shape[0]
    pads = [-size % MULTIPLE for size in (rows, columns, inner)]
    left, right = _padded(left, pads[0], pads[2]), _padded(right, pads[1], pads[2])
    one = torch.ones((), dtype=torch.float32, device=left.device)
    sums = torch._scaled_mm(left, right.T, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=False)
    return sums[:rows, :columns]


def _padded(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Append zero rows and columns; as bytes, since float8 cannot be padded on every device."""
    if not rows and not columns:
        return codes.contiguous()
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)


@cache
def _has_kernel(card: int, left: torch.dtype, right: torch.dtype) -> bool:
    """Return whether the GPU has the kernel for these two dtypes and its results match float32; tried once."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(card) < LEAST_CAPABILITY:
        return False
    draw = torch.Generator().manual_seed(0)
    one, other = (
        torch.randn(size, 256, generator=draw, dtype=torch.float32, device="cpu").to(dtype).to(f"cuda:{card}")
        for size, dtype in ((33, left), (48, right))
    )
    try:
        result = by_kernel(one, other)
    except RuntimeError:  # two types of e5m2 have none
        return False
    expected = one.float() @ other.float().T
    return bool((result - expected).abs().max() <= TOLERANCE * expected.abs().max())

"""A tensor divided by a number, with one rounding on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def divided(x: Tensor, by: float) -> Tensor:
    """x / by, of x's shape, float dtype and device, with the CPU's bits.

    On CUDA, ROCm and XPU torch multiplies by the reciprocal of a Python number, which rounds twice: scales would differ
    from those of a CPU, and from those of the Triton kernels, in their last bit. A tensor on the device is divided by.
    """
    wide = x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x  # so that `by` is not rounded
    return wide.div(wide.new_full((), by)).to(x.dtype)

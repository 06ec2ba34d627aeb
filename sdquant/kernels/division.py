"""A tensor divided by a number, with one rounding on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def divided(x: Tensor, by: float) -> Tensor:
    """Return x / by in x's shape, float dtype and device, bit-equal to the CPU's result.

    On CUDA, ROCm and XPU torch multiplies by the reciprocal of a Python number, which rounds twice: scales would differ
    from those of a CPU, and from those of the Triton kernels, in the last bit. So this divides by a tensor.
    """
    wide = x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x  # so that `by` is not rounded
    return wide.div(wide.new_full((), by)).to(x.dtype)

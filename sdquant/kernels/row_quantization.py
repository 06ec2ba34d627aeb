"""Rows of numbers as 8-bit codes with a scale for each row, in torch; the formulas are in `int8_linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.tensors import divided

LARGEST = 127.0
# Rows whose largest value is below this count as zeros: the quotient 127 / largest would overflow.
LEAST = 2.0**-100


def quantized_rows(x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows x [m, k] of any float dtype to codes, int8 [m, k], and scales, float32 [m, 1]; see the module.

    A row that is not finite gets NaN as its scale: its results are NaN.
    """
    codes, scale = scaled_rows(x, LARGEST)
    codes = codes.round_()
    return (codes.to(torch.int8) if out is None else out.copy_(codes)), scale


def scaled_rows(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Scale rows x [m, k] so that the largest magnitude in each is `most`. Return them, float32, and scales [m, 1]."""
    values = x.to(torch.float32)
    largest = values.abs().amax(1, keepdim=True)
    zero = largest < LEAST
    # A number divided by a tensor would be its reciprocal times the number, rounded twice.
    factor = largest.new_full((), most).div(largest).masked_fill_(zero, 0.0)
    scale = divided(largest.sub(largest).add_(largest), most).masked_fill_(zero, 0.0)  # NaN instead of infinity
    return values.mul(factor), scale

"""NNCF's 8-bit encoding of a matrix in plain torch: bit-equal to its `compress_weight`, in half the time.

NNCF wraps each operation, which costs more than the operation does on the few rows that fit into the cache. The
formulas are those of its `calculate_integer_quantization_params` and `_calculate_integer_quantized_weight` (nncf 3.4),
all in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.tensors import divided

_EPS = torch.finfo(torch.float32).eps  # NNCF's least scale


def encode_eight(matrix: Tensor, asymmetric: bool) -> dict[str, Tensor]:
    """Quantize some rows, [rows, row] of any float dtype, to the parts described in `nncf.NNCF`."""
    values = matrix.to(torch.float32, copy=True)
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    if not asymmetric:
        least = low.abs()
        scale = _no_zero(torch.where(least >= high, least, -high) / 128)
        codes = values.div_(scale).round_().clamp_(-128, 127).to(torch.int8)
        return {"codes": codes, "scale": scale.to(torch.float16)}
    low, high = low.clamp_(max=0), high.clamp_(min=0)
    scale = _no_zero(divided(high - low, 255))
    zero_point = (0 - (low / scale).round_()).to(torch.int32).clamp_(0, 255)
    values.div_(scale).add_(zero_point).round_().clamp_(0, 255)
    # By way of int8, as torch converts floats to uint8 five times as slowly.
    codes = values.sub_(128).to(torch.int8).view(torch.uint8).bitwise_xor_(128)
    return {"codes": codes, "scale": scale.to(torch.float16), "zero_point": zero_point.to(torch.uint8)}


def _no_zero(scale: Tensor) -> Tensor:
    return torch.where(scale.abs() < _EPS, _EPS, scale)

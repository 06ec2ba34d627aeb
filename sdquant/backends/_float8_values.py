"""Float8 codes as floats. On a CPU by table: torch's own conversion takes four times as long there."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import code_tables


def floats_of(codes: Tensor) -> Tensor:
    """Convert float8 codes of any kind and shape to float32."""
    if codes.device.type != "cpu":
        return codes.float()
    table = code_tables.float8_values(codes.dtype, torch.float32, codes.device)
    return table.index_select(0, codes.view(torch.uint8).reshape(-1).int()).view(codes.shape)

"""Lookup tables of `packed_layout`: the value of each code."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import code_tables
from ..core.code_tables import E2M1_LEVELS
from ..utils.device_constants import constant


@constant
def code_table(name: str, arithmetic: str, device: torch.device) -> Tensor:
    """Return the values by code, float32 [16 or 256], rounded to the dtype `arithmetic`."""
    if name == "e4m3":
        values = code_tables.e4m3_code(device)
    elif name == "e2m1":
        values = torch.tensor((*E2M1_LEVELS, *(-level for level in E2M1_LEVELS)), dtype=torch.float32, device=device)
    else:
        values = code_tables.fourbit_code(name, device)
    return values.to(getattr(torch, arithmetic)).to(torch.float32)

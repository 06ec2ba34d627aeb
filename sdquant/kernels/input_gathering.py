"""Activations for weights whose inputs are multiplied or gathered (`core.input_columns`): in one launch on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..core import input_columns, torch_dtypes
from .dispatch_guard import plain, seen
from .triton import imports

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import Packed


def gather_inputs(packed: Packed, x: Tensor) -> Tensor:
    """Return `input_columns.gather` of x [..., in]."""
    factors, order = packed.parts.get(input_columns.COLUMNS), packed.parts.get(input_columns.ORDER)
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    if x.device.type in ("cuda", "xpu") and x.dtype in torch_dtypes.COMPUTE_DTYPES and plain(x) and not seen(x):
        kernels = None if is_recorded else imports.gathering(x.device)
        is_known = (order is None or order.dtype == torch.int32) and (factors is None or factors.dtype == torch.float32)
        if kernels is not None and is_known:
            by_triton: Tensor = kernels.gather_columns(x, order, factors)
            return by_triton
    return input_columns.gather(packed, x)

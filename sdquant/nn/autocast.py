"""What quantized layers do under `torch.autocast`, which knows the operations of torch's own layers only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..utils.autocast import is_autocast_on


def autocast_input(x: Tensor) -> Tensor:
    """Cast x as torch's own layers do under `torch.autocast`; the weight is then dequantized to the dtype of x."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if is_autocast_on(kind) else x


def without_autocast(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call `run` with activations in autocast's dtype and autocast off: operations inside a layer are not the user's
    code, and its float32 values must stay float32."""
    x = autocast_input(x)
    with torch.autocast(x.device.type, enabled=False):
        return run(x)

"""Kernel launches, and the devices where kernels can be launched."""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton

from .decoding import rounded

# Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when triton was imported), on the CPU.
INTERPRETED = not isinstance(rounded, triton.runtime.JITFunction)
# A multiplication and an addition are rounded one by one, as torch does it.
EXACT = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments by parameter name; `options` are Triton's own."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def __call__(self, device: torch.device) -> None:
        with _on(device):
            self.kernel[self.grid](**self.arguments, **self.options)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current: Triton launches on the current device, which need not be the tensors'."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    if device.type == "xpu" and device.index != torch.xpu.current_device():
        return torch.xpu.device(device)
    return nullcontext()


def works_on(device: torch.device) -> bool:
    """Return whether kernels can be launched on a device. A GPU too old for Triton only fails at the first launch."""
    return device.type == "cpu" if INTERPRETED else device.type in ("cuda", "xpu")

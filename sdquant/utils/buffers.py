"""Memory for weights: buffers that return to the system when they are freed, and releasing freed memory."""

from __future__ import annotations

import gc
import math
import mmap
import sys
from typing import TYPE_CHECKING, Any

import torch

from . import malloc_trim
from .inference_mode import ordinary
from .malloc_trim import trim

if TYPE_CHECKING:
    from torch import Tensor

LARGE = 1 << 20  # bytes from which on a tensor is mapped by hand
ALIGN = 64  # bytes; torch's own alignment on the CPU, so that kernels choose the same path for moved weights


@ordinary
def flat_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Return uninitialised bytes, uint8 [nbytes], whose memory returns to the system when they are freed.

    On the CPU they are mapped by hand: the C library keeps what is freed to it, which would leave a streamed model in
    memory that nobody uses.
    """
    if device.type == "cpu" and nbytes and sys.platform != "win32":
        area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(area, dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor; a large one is a `flat_buffer`."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LARGE:
        return torch.empty(shape, dtype=dtype, device=device)
    return flat_buffer(nbytes, device).view(dtype).view(shape)


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor, contiguous and with a last stride of 1; a copy only if it has other strides.

    torch calls a tensor contiguous whatever the stride of a dimension of size 1 is, and views its bytes as another
    dtype only where the last stride is 1.
    """
    tensor = tensor.contiguous()
    usual = not tensor.ndim or tensor.stride(-1) == 1
    return tensor if usual else tensor.clone(memory_format=torch.contiguous_format)


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the values of the tensor as bytes, in the CPU's memory."""
    return dense(tensor.detach().cpu().reshape(-1)).view(torch.uint8).numpy().data


def give_back() -> None:
    """Collect garbage, and release freed memory: the GPU allocator's cache and the C library's."""
    gc.collect()
    if torch.accelerator.is_available():
        card = torch.accelerator.current_accelerator()
        give: Any = getattr(getattr(torch, card.type, None), "empty_cache", None) if card is not None else None
        if give is not None:
            give()
    trim()
    malloc_trim.forget()

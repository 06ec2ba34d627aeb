"""Memory of kernels: the workspace into which weights are dequantized.

On CPUs the workspace is one growing buffer per thread and dtype. A fresh buffer for each call costs far more there than
the arithmetic: the page faults of 75 MB take ten times as long as decoding into memory that is already mapped
(measured on a Zen 4 core: 2.2 against 22 GB/s). On other devices each call allocates its own memory: a thread can have
work on two streams of a GPU, which would write into the same buffer at the same time, and the GPU's caching allocator
returns memory to the stream that it was used on.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from ..utils.inference_mode import ordinary

_local = threading.local()
_empty = ordinary(torch.empty)  # it is written to in inference mode and outside of it
_CPU = torch.device("cpu")


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor, valid until this thread requests the next one of the same dtype and device."""
    if device.type != "cpu":
        return _empty(shape, dtype=dtype, device=device)
    size = math.prod(shape)
    return _buffer(size, dtype, device)[:size].view(shape)


def address(size: int) -> int:
    """Return the address of `size` bytes of CPU memory: the int8 buffer of `scratch`, without creating a tensor."""
    return _buffer(size, torch.int8, _CPU).data_ptr()


def _buffer(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    buffers: dict[tuple[torch.dtype, torch.device], Tensor] = _local.__dict__.setdefault("buffers", {})
    buffer = buffers.get((dtype, device))
    if buffer is None or buffer.numel() < size:
        buffer = buffers[dtype, device] = _empty(size, dtype=dtype, device=device)
    return buffer


def reserved_bytes() -> int:
    """Return the size of this thread's buffers in bytes."""
    buffers: dict[object, Tensor] = _local.__dict__.get("buffers", {})
    return sum(buffer.numel() * buffer.element_size() for buffer in buffers.values())


def release() -> None:
    """Free this thread's buffers."""
    _local.__dict__.pop("buffers", None)

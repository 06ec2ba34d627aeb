"""Pin RAM, which a device can read by itself, without rounding its size up.

torch rounds pinned sizes up to a power of two (ATen/core/CachingHostAllocator.h), so that a model can take up to twice
its size of RAM that nothing else can use, and keeps freed memory. CUDA, and ROCm under the same names, can pin memory
that is already allocated, which is used if a test shows that it works. Otherwise torch pins, and the rounded size is
counted.

`Staging` copies pageable memory to a device through pinned buffers, so that the device goes on computing. The driver
can copy such memory as well, but blocks the stream, and the program until all earlier work is done. Here one pinned
buffer is filled while the device copies the other.
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
from abc import ABC, abstractmethod
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from ..utils.inference_mode import ordinary

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


log = logging.getLogger(__name__)

ROUNDING = ("cuda", "xpu")  # devices whose pinned memory comes from torch's allocator, which rounds
_TRIED = 1 << 20  # bytes


class Pinning(ABC):
    """A way to pin memory."""

    @abstractmethod
    def takes(self, nbytes: int) -> int:
        """Return the bytes of RAM that pinning `nbytes` takes."""

    @abstractmethod
    def make(self, nbytes: int) -> Tensor:
        """Return uninitialised pinned memory, uint8 [nbytes > 0]. Raises RuntimeError if the system pins no more."""


class ByTorch(Pinning):
    """Pinning by torch's allocator. `rounds`: whether it rounds sizes up to a power of two."""

    def __init__(self, rounds: bool) -> None:
        self._rounds = rounds

    def takes(self, nbytes: int) -> int:
        return 1 << (nbytes - 1).bit_length() if self._rounds and nbytes else nbytes

    def make(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")


class _Area(mmap.mmap):
    """Anonymous pages with a callback before they are freed, which a weak reference would call only afterwards."""

    let_go: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.let_go is not None and not sys.is_finalizing():  # the system frees everything then
            self.let_go()


class Registered(Pinning):
    """Pinning of ordinary memory by registration; it is unregistered before it is freed. Not for Windows.

    Args:
        runtime: object with `cudaHostRegister(address, nbytes, flags)` and `cudaHostUnregister(address)`, both of which
            return 0 on success: `torch.cuda.cudart()`.
        device: the device that reads the memory.
    """

    def __init__(self, runtime: Any, device: torch.device) -> None:
        self._runtime, self._device = runtime, device

    def takes(self, nbytes: int) -> int:
        return nbytes

    @ordinary
    def make(self, nbytes: int) -> Tensor:
        area = _Area(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        flat = torch.frombuffer(area, dtype=torch.uint8)
        error = int(self._runtime.cudaHostRegister(flat.data_ptr(), nbytes, 0))
        if error:
            self._forget_error()
            raise RuntimeError(f"cudaHostRegister of {nbytes} bytes: error {error}")
        area.let_go = partial(self._let_go, flat.data_ptr())
        return flat

    def _let_go(self, address: int) -> None:
        torch.get_device_module(self._device).synchronize(self._device)  # wait for copies that still read it
        self._runtime.cudaHostUnregister(address)

    def _forget_error(self) -> None:
        """Clear CUDA's last error, which torch would raise for the next kernel that is launched."""
        try:
            torch.zeros(1, device=self._device, dtype=torch.float32).add_(1)
        except RuntimeError as error:
            log.debug("Cleared the error of the failed call: %s", error)


@cache
def pinning(device: torch.device) -> Pinning:
    """Return the way to pin memory for this device."""
    by_torch = ByTorch(rounds=device.type in ROUNDING)
    if device.type != "cuda" or sys.platform == "win32":
        return by_torch
    try:
        candidate = Registered(torch.cuda.cudart(), device)  # type: ignore[no-untyped-call]
        works = proves(candidate, device)
    except (RuntimeError, AttributeError, TypeError) as error:
        log.info("torch pins the memory instead, which takes more of it: %s", error)
        works = False
    return candidate if works else by_torch


def proves(candidate: Pinning, device: torch.device) -> bool:
    """Return whether torch recognises such memory as pinned, and a copy to the device and back is unchanged."""
    piece, back = candidate.make(_TRIED), candidate.make(_TRIED)
    piece.copy_(torch.arange(_TRIED, dtype=torch.int64, device="cpu").remainder(251))
    there = torch.empty(_TRIED, dtype=torch.uint8, device=device)
    there.copy_(piece, non_blocking=True)
    back.copy_(there, non_blocking=True)
    torch.get_device_module(device).synchronize(device)
    return piece.is_pinned() and back.is_pinned() and torch.equal(piece, back)


PIECE = 1 << 24  # bytes


class Staging:
    """Two pinned buffers for copies of pageable memory to a device. Raises RuntimeError if the system pins no memory.

    Args:
        api: torch's module for the device's streams and events.
    """

    def __init__(self, api: Any, device: torch.device) -> None:
        self._api, self._device = api, device
        self._pieces = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(2)]
        self._copied = [api.Event() for _ in self._pieces]
        self._lock = threading.Lock()

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Copy `source`, uint8 [n] in pageable memory, to `into`, uint8 [n] on the device. Returns when the last piece
        is queued on the thread's current stream."""
        with self._lock:
            for number, begin in enumerate(range(0, len(source), PIECE)):
                part = source[begin : begin + PIECE]
                piece, copied = self._pieces[number % 2][: len(part)], self._copied[number % 2]
                copied.synchronize()  # what the device still reads must not be overwritten
                piece.copy_(part)
                into[begin : begin + len(part)].copy_(piece, non_blocking=True)
                copied.record(self._api.current_stream(self._device))

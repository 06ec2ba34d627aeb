"""Copying a unit to the device while the device computes: a thread for the CPU, a side stream for CUDA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from .units import Unit


class Ticket(ABC):
    """A copy on its way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has arrived."""

    @abstractmethod
    def wait(self) -> Tensor:
        """The bytes, once they may be computed with. Raises what the copy raised."""

    @abstractmethod
    def abandon(self) -> None:
        """Come back when the copy is over, however it went: nobody wants it."""


class Transfer(ABC):
    """Starts copies, one after another."""

    @abstractmethod
    def start(self, unit: Unit, buffer: Tensor) -> Ticket:
        """Start copying a unit into `buffer`, after what has been computed from it so far."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the last copy and end."""


class _ThreadTicket(Ticket):
    def __init__(self, future: Future[Tensor]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Tensor:
        return self._future.result()

    def abandon(self) -> None:
        self._future.exception()


class ThreadTransfer(Transfer):
    """A background thread. Reading files and copying memory let the computing thread run meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sdquant-prefetch")

    def start(self, unit: Unit, buffer: Tensor) -> Ticket:
        return _ThreadTicket(self._pool.submit(unit.read, buffer, self._device))

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class _StreamTicket(Ticket):
    def __init__(self, buffer: Tensor, event: torch.cuda.Event) -> None:
        self._buffer, self._event = buffer, event

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        # The computing stream waits, the program goes on.
        torch.cuda.current_stream(self._buffer.device).wait_event(self._event)
        return self._buffer

    def abandon(self) -> None:
        self.wait()  # what the computing stream does next with the buffer comes after the copy


class StreamTransfer(Transfer):
    """A CUDA stream beside the computing one; copies from pinned memory run while kernels do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, unit: Unit, buffer: Tensor) -> Ticket:
        # What was computed from the buffer so far has to be over before it is overwritten.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            got = unit.read(buffer, self._device)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        # The allocator must not hand the buffer to others while the side stream may still write to it.
        got.record_stream(self._stream)
        return _StreamTicket(got, event)

    def close(self) -> None:
        self._stream.synchronize()


def transfer(device: torch.device) -> Transfer:
    """The way to copy in the background to this device."""
    return StreamTransfer(device) if device.type == "cuda" else ThreadTransfer(device)

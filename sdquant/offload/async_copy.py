"""Copy units to the device while it computes: on a side stream if it has streams, else in a thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from .blocks import Unit


class Ticket(ABC):
    """A copy in progress."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the copy is complete."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Return the bytes, once they can be used. Raises the error of the copy."""

    @abstractmethod
    def abandon(self) -> None:
        """Wait for the end of a copy that is not needed, whether it succeeded or failed."""


class Transfer(ABC):
    """A queue of copies, one after another."""

    @abstractmethod
    def start(self, unit: Unit, buffer: Tensor) -> Ticket:
        """Start copying a unit into `buffer`, after the computations from its present contents."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the last copy and stop."""


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
    """Copies in a background thread. Reading files and copying memory release the GIL, so that computing goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sdquant-prefetch")

    def start(self, unit: Unit, buffer: Tensor) -> Ticket:
        return _ThreadTicket(self._pool.submit(unit.read, buffer, self._device))

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class _StreamTicket(Ticket):
    """A copy that is queued on a stream, or that a thread is queueing there: its buffer, and the event after it."""

    def __init__(self, future: Future[tuple[Tensor, Any]], api: Any) -> None:
        self._future, self._api = future, api

    def done(self) -> bool:
        return self._future.done() and (self._future.exception() is not None or bool(self._future.result()[1].query()))

    def wait(self) -> Tensor:
        buffer, event = self._future.result()
        # The computing stream waits, the program goes on.
        self._api.current_stream(buffer.device).wait_event(event)
        return buffer

    def abandon(self) -> None:
        if self._future.exception() is None:
            self.wait()  # what the computing stream does next with the buffer comes after the copy


class StreamTransfer(Transfer):
    """Copies on streams beside the computing one, concurrent with kernels.

    Copies that the device does by itself (from pinned memory) are queued on one stream at once. Others, which occupy
    the CPU, are queued on a second stream by a thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._api: Any = streams(device)
        self._direct, self._threaded = (self._api.Stream(device) for _ in range(2))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sdquant-prefetch")

    def start(self, unit: Unit, buffer: Tensor) -> Ticket:
        # What was computed from the buffer so far has to be over before it is overwritten.
        computed = self._api.Event()
        computed.record(self._api.current_stream(self._device))
        if unit.waits:
            return _StreamTicket(self._pool.submit(self._copy, unit, buffer, computed, self._threaded), self._api)
        future: Future[tuple[Tensor, Any]] = Future()
        future.set_result(self._copy(unit, buffer, computed, self._direct))
        return _StreamTicket(future, self._api)

    def _copy(self, unit: Unit, buffer: Tensor, computed: Any, stream: Any) -> tuple[Tensor, Any]:
        stream.wait_event(computed)
        with self._api.stream(stream):
            try:
                got = unit.read(buffer, self._device)
            except BaseException:
                stream.synchronize()  # the caller may reuse the buffer after the error
                raise
            copied = self._api.Event()
            copied.record(stream)
        # The allocator must not hand the buffer to others while the stream may still write to it.
        got.record_stream(stream)
        return got, copied

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self._direct.synchronize()
        self._threaded.synchronize()


def streams(device: torch.device) -> Any:
    """Return torch's module with the streams and events of such devices (torch.cuda, torch.xpu), or None if copies
    cannot overlap computing: on the CPU, whose streams do nothing, and on Apple's and DirectML's devices."""
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if hasattr(module, "Stream") else None


def transfer(device: torch.device) -> Transfer:
    """Return the way to copy in the background to this device."""
    return ThreadTransfer(device) if streams(device) is None else StreamTransfer(device)

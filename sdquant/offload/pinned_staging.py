"""Copying to a device from memory that is not pinned, through pieces that are, so that the device goes on computing.

The driver copies such memory as well, but lets nothing else of the stream go on, and the program wait for all that was
computed before. Here one pinned piece is filled while the device copies the other.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 24  # bytes


class Staging:
    """Two pinned pieces of memory. Raises RuntimeError where the system pins none.

    Args:
        api: torch's module for the device's streams and events.
    """

    def __init__(self, api: Any, device: torch.device) -> None:
        self._api, self._device = api, device
        self._pieces = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [api.Event() for _ in self._pieces]
        self._lock = threading.Lock()

    def copy(self, source: Tensor, into: Tensor) -> None:
        """`source`, uint8 [n] in ordinary memory, into uint8 [n] on the device; comes back when the last of it is on
        its way in the thread's current stream."""
        with self._lock:
            for number, begin in enumerate(range(0, len(source), PIECE)):
                part = source[begin : begin + PIECE]
                piece, copied = self._pieces[number % 2][: len(part)], self._copied[number % 2]
                copied.synchronize()  # what the device still reads must not be overwritten
                piece.copy_(part)
                into[begin : begin + len(part)].copy_(piece, non_blocking=True)
                copied.record(self._api.current_stream(self._device))

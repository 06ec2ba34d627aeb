"""Copy pageable memory to a device through pinned buffers, so that the device goes on computing.

The driver can copy such memory as well, but blocks the stream, and the program until all earlier work is done. Here one
pinned buffer is filled while the device copies the other.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 24  # bytes


class Staging:
    """Two pinned buffers. Raises RuntimeError if the system pins no memory.

    Args:
        api: torch's module for the device's streams and events.
    """

    def __init__(self, api: Any, device: torch.device) -> None:
        self._api, self._device = api, device
        self._pieces = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
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

"""The lock of an offloaded model, which also admits threads that compute gradients for the lock's holder.

On a GPU backward runs in autograd's own threads, while the thread that called it waits. If that thread holds the lock
(in a pipeline callback that computes a gradient), an ordinary lock would deadlock. Importing this module imports no
torch.
"""

from __future__ import annotations

import sys
import threading

_POLL = 0.01  # seconds between two checks of what the holder is doing
# The function of torch.autograd in which a thread waits for its gradients.
_WAITING = "_engine_run_backward"


class ComputingLock:
    """A re-entrant lock for use with `with`."""

    def __init__(self) -> None:
        self._lock, self._guests = threading.RLock(), threading.RLock()
        self._holder: int | None = None
        self._depth = 0
        self._entered = threading.local()

    def __enter__(self) -> None:
        mine: list[bool] = self._entered.__dict__.setdefault("as_guest", [])
        while not self._lock.acquire(timeout=_POLL):
            if self._computes_for_the_holder():
                self._guests.acquire()
                mine.append(True)
                return
        self._holder = threading.get_ident()
        self._depth += 1
        mine.append(False)

    def __exit__(self, *_: object) -> None:
        if self._entered.as_guest.pop():
            self._guests.release()
            return
        self._depth -= 1
        if not self._depth:
            self._holder = None
        self._lock.release()

    def _computes_for_the_holder(self) -> bool:
        """Return whether this is a thread of autograd, and the holder waits for gradients."""
        import torch

        holder = self._holder
        if holder is None or torch._C._current_graph_task_id() == -1:
            return False
        frame = sys._current_frames().get(holder)
        while frame is not None and frame.f_code.co_name != _WAITING:
            frame = frame.f_back  # some of backward may run in the holder's own thread
        return frame is not None

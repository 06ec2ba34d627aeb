"""Handle Ctrl-C and SIGTERM during a training: they end it after the current step."""

from __future__ import annotations

import signal
import threading
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Context that records the first signal; a second one has its usual effect.

    Attributes:
        seen: the signal, or None.
    """

    def __init__(self) -> None:
        self.seen: int | None = None
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # only that one may set handlers
            self._old = {number: signal.signal(number, self._first) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}

    def _first(self, number: int, _: object) -> None:
        self.seen = number
        self.__exit__()

"""Ctrl-C and SIGTERM while a command runs: the stack unwinds, and what is half-written goes."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from .distributed import label

AGAIN = 0.02  # seconds until a signal that could not be obeyed comes again
PATIENCE = 10.0  # seconds for which one waits for imports at the most
_IMPORTING = "<frozen importlib._bootstrap>"


class Stop:
    """While it is entered, either signal raises KeyboardInterrupt in the main thread, and is remembered in `signal`.

    There are two places where an interrupt would be lost, and it comes again after them:

    * an import. Compiled modules end the process (triton), others swallow the interrupt, or stay half-imported and fail
      with an error of another kind;
    * a finalizer, whose exceptions Python reports and forgets.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._until = 0.0
        self._old: dict[signal.Signals, Any] = {}
        self._report = sys.unraisablehook

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # only that one may set handlers
            self._old = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
            self._report, sys.unraisablehook = sys.unraisablehook, self._forgotten

    def __exit__(self, *_: object) -> None:
        if self._old:
            sys.unraisablehook = self._report
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._until = number, time.monotonic() + PATIENCE
        if _importing(frame) and time.monotonic() < self._until:
            self._again()
        else:
            raise KeyboardInterrupt

    def _forgotten(self, report: Any) -> None:
        if self.signal is not None and report.exc_type is KeyboardInterrupt:
            self._again()
        else:
            self._report(report)

    def _again(self) -> None:
        # Not `threading`: its locks may be held by what was interrupted.
        _thread.start_new_thread(self._send, ())

    def _send(self) -> None:
        time.sleep(AGAIN)
        if signal.getsignal(self.signal or 0) != self._stop:
            return  # all is over
        if sys.platform == "win32":
            signal.raise_signal(self.signal or 0)
        else:  # to the thread that may be waiting for something
            signal.pthread_kill(threading.main_thread().ident or 0, self.signal or 0)

    def say(self) -> int:
        """Print the final message, and return the exit code."""
        # CPython takes an interrupt inside an exec() of text for unhandled, however it is handled later, and would end
        # by the signal instead of with our code. The next exec() makes it forget.
        exec("")
        message = "terminated" if self.signal == signal.SIGTERM else "interrupted"
        if label() and self.signal == signal.SIGTERM:
            message += ", as torchrun does when another process has ended: look at the message of that one"
        print(f"sdquant{label()}: {message}", file=sys.stderr)
        return 128 + int(self.signal or 0)


def _importing(frame: FrameType | None) -> bool:
    """Return whether the frame runs inside an import."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False

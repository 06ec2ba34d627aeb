"""Ctrl-C (SIGINT) and SIGTERM. Whatever handles them does so by one of these:

    Stop                a command: the stack unwinds, what is half-written goes, and the exit code says which it was
    Interrupts          a training: it ends after its step
    undisturbed         a few lines that must not be torn apart: the signal comes after them
    obey_only_parent    a process that belongs to another one of ours
    handled             a block with a handler of its own: the ground of the others

`Stop.say` clears a flag of CPython's with `exec("")`. An interrupt that passes through an `exec()` of text sets it,
however it is handled later (run_eval_code_obj in Python/pythonrun.c), and `python -m` then ends as if by SIGINT,
whatever the exit code (Py_RunMain in Modules/main.c). Nothing documented resets it; the next `exec()` of text does.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from .distributed import label

AGAIN = 0.02  # seconds until a signal that could not be obeyed comes again
PATIENCE = 10.0  # seconds for which one waits for imports at the most
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_IMPORTING = "<frozen importlib._bootstrap>"


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle both signals by `handler` until the block is done. Outside the main thread nothing is changed: only that
    one may set handlers."""
    old: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not None:  # set by C code, and not to be set again from here
                    old[number] = signal.signal(number, handler)
        yield
    finally:
        for each, before in old.items():
            signal.signal(each, before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM until the block is done. A second signal often comes while the first is handled: people
    press Ctrl-C twice, and torchrun terminates a process that is already ending because another one failed."""
    came: list[int] = []
    try:
        with handled(lambda number, _: came.append(number)):
            yield
    finally:
        for each in came[:1]:
            signal.raise_signal(each)


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error was caused by Ctrl-C, which libraries may wrap in other errors during import."""
    before = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt) or (before is not None and is_interrupt(before))


def obey_only_parent() -> None:
    """Exit on SIGTERM, with the cleanup of what is open, and ignore Ctrl-C: that is for the process that started this
    one, which ends it."""
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


class Interrupts:
    """Context that records the first signal; a second one has its usual effect.

    Attributes:
        seen: the signal, or None.
    """

    def __init__(self) -> None:
        self.seen: int | None = None
        self._handler = ExitStack()

    def __enter__(self) -> Interrupts:
        self._handler.enter_context(handled(self._first))
        return self

    def __exit__(self, *_: object) -> None:
        self._handler.close()

    def _first(self, number: int, _: object) -> None:
        self.seen = number
        self._handler.close()


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
        self._handler = ExitStack()
        self._report = sys.unraisablehook

    def __enter__(self) -> None:
        self._handler.enter_context(handled(self._stop))
        if threading.current_thread() is threading.main_thread():
            self._report, sys.unraisablehook = sys.unraisablehook, self._forgotten
            self._handler.callback(setattr, sys, "unraisablehook", self._report)

    def __exit__(self, *_: object) -> None:
        self._handler.close()

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
        exec("")  # see the head of this file
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

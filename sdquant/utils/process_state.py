"""Process-wide state changed while threads are in a block: by the first thread to enter, until the last one leaves.

If each thread saved and restored the state by itself, one would save and later restore what another had changed:
loggers would stay silent and warnings ignored. Importing this module imports no torch.
"""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Shared:
    """A context manager that any number of threads, and blocks inside blocks, can be in at once."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        """`make` returns the context that the first thread enters and the last one leaves."""
        self._make = make
        self._lock = threading.Lock()
        self._inside = 0
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._entered.enter_context(self._make())
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._entered.close()


@contextmanager
def _warnings_ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


no_warnings = Shared(_warnings_ignored)


class _Quieted:
    """A context manager that suppresses all but the errors of one logger, for any number of threads."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._lock = threading.Lock()
        self._inside = 0
        self._level: int | None = None  # of the logger, while it is raised

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            # Each time, as a library that is imported meanwhile sets the level of its logger (transformers does).
            if self._logger.level < logging.ERROR:  # setting a level empties the caches of all loggers there are
                self._level = self._logger.level
                self._logger.setLevel(logging.ERROR)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside or self._level is None:
                return
            if self._logger.level == logging.ERROR:  # not what its library or somebody else has set since
                self._logger.setLevel(self._level)
            self._level = None


_lock = threading.Lock()
_loggers: dict[str, _Quieted] = {}


@contextmanager
def errors_only(*names: str) -> Iterator[None]:
    """Suppress all but errors of these loggers; restore their levels afterwards."""
    with _lock:
        shared = [_loggers.setdefault(name, _Quieted(name)) for name in names]
    with ExitStack() as stack:
        for one in shared:
            stack.enter_context(one)
        yield

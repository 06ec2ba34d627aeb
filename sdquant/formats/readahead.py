"""Prefetch the next part of the files while this one is processed, so that reading and encoding overlap.

Weights are read through the page cache (mapped files). Left to itself, the system reads a mapped file in small steps,
each of which the encoder waits for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

WINDOW = 128 << 20  # bytes ahead of what has been used
STEP = 16 << 20


class Readahead:
    """Prefetches some files in the order in which they are used, `WINDOW` bytes ahead."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._left = list(paths)
        self._file: int | None = None
        self._at = self._size = self._asked = self._used = 0
        self.advance(0)

    def advance(self, nbytes: int) -> None:
        """Record that `nbytes` more bytes have been used, and prefetch accordingly."""
        self._used += nbytes
        while self._asked < self._used + WINDOW and self._next():
            os.posix_fadvise(self._file or 0, self._at, STEP, os.POSIX_FADV_WILLNEED)
            self._at += STEP
            self._asked += STEP

    def _next(self) -> bool:
        """Return whether a file with bytes left to prefetch is open, opening the next one if needed."""
        if not hasattr(os, "posix_fadvise"):  # macOS and Windows read mapped files ahead in their own ways
            return False
        while self._file is None or self._at >= self._size:
            self.close()
            if not self._left:
                return False
            try:
                self._file = os.open(self._left.pop(0), os.O_RDONLY)
            except OSError:  # whoever reads it says so
                continue
            self._at, self._size = 0, os.fstat(self._file).st_size
        return True

    def close(self) -> None:
        """Close the open file and prefetch no more of it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

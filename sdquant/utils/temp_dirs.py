"""Temporary folders that are always removed after use, even on Ctrl-C."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .signals import undisturbed


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a folder (its real path) that only this user can read, removed at the end of the block."""
    folder: Path | None = None
    try:
        with undisturbed():  # between the folder and its name nobody could remove it
            folder = Path(os.path.realpath(tempfile.mkdtemp(prefix=prefix)))
        yield folder
    finally:
        if folder is not None:
            _remove(folder)


class OwnFolder:
    """A folder that goes with `close()`, with this object, or when the interpreter ends.

    Args:
        prefix: what its name begins with.
        place: the folder that it is made in.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, prefix: str, place: Path) -> None:
        with undisturbed():
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            self._close = weakref.finalize(self, _remove, self.path)

    def close(self) -> None:
        self._close()


def _remove(folder: Path) -> None:
    """Remove what can be removed: on Windows a file that is still mapped stays."""
    with undisturbed():
        shutil.rmtree(folder, ignore_errors=True)

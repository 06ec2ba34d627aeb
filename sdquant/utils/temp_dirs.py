"""Temporary folders that are always removed after use, even on Ctrl-C."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from .signals import undisturbed


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a folder (its real path) that only this user can read, removed at the end of the block."""
    with closing(OwnFolder(prefix, Path(tempfile.gettempdir()).resolve())) as folder:
        yield folder.path


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
            self.close = weakref.finalize(self, _remove, self.path)


def _remove(folder: Path) -> None:
    """Remove what can be removed: on Windows a file that is still mapped stays."""
    with undisturbed():
        shutil.rmtree(folder, ignore_errors=True)

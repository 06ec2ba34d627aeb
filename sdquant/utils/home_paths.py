"""Paths that users write, with "~" for their home."""

from __future__ import annotations

import os
from pathlib import PurePath


def with_home(path: str | os.PathLike[str]) -> str:
    """Return a path with its "~" expanded, as text, which stays the same if it is expanded again.

    "./~/model", a folder called "~", becomes absolute: pathlib drops the "./" that tells it from the user's home.
    """
    text = os.path.expanduser(path)
    return os.path.abspath(text) if text[:1] != "~" and str(PurePath(text))[:1] == "~" else text

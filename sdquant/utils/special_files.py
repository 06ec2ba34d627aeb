"""The error for what is not a regular file: a link that leads nowhere, a folder, a pipe, a device."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import BadFileError


def not_regular(what: str, path: Path) -> BadFileError:
    """Return the error for a path where a file was expected; it tells a broken link, as of a copied hub cache, apart.

    Args:
        what: "Cannot read ..."
    """
    if os.path.islink(path) and not os.path.exists(path):
        why = f"it is a link to {os.readlink(path)}, where there is no file"
        return BadFileError(what, why, "Download it again, or copy the file itself in place of the link")
    return BadFileError(what, "it is not a regular file", "Check the path")

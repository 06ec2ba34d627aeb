"""Sizes in bytes, read and written as people write them: "6GB", "3.8 MB"."""

from __future__ import annotations

import operator
import re
from decimal import Decimal
from typing import SupportsIndex

from ..errors import SettingsError

GIB = 1 << 30

_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}
_MOST = (1 << 63) - 1  # bytes of a file, and more than any machine has


def parse_budget(text: str | float | None) -> int | None:
    """Return a budget in bytes, see `parse_size`; None stays None: the machine decides.

    Raises:
        SettingsError: not a size, or not a positive one.
    """
    return None if text is None else parse_size(text, "A budget")


def parse_size(text: str | float, what: str) -> int:
    """Return a size in bytes: "6GB" -> 6_000_000_000, "512MiB" -> 536_870_912, whole numbers as they are.

    Raises:
        SettingsError: the text is not a positive size; `what` ("A budget") begins the error.
    """
    size = _bytes_of(text)
    if 0 < size <= _MOST:
        return size
    shown = repr(text)
    raise SettingsError(
        f"{what} cannot be {shown if len(shown) <= 40 else f'{shown[:40]}...'}",
        "no machine has so many bytes" if size > 0 else "it is not a size in bytes above zero",
        "Write it like '6GB', '512MB', '4GiB', or as a whole number of bytes",
    )


def _bytes_of(text: object) -> int:
    """Return a size in bytes; 0 if it is none."""
    if isinstance(text, SupportsIndex) and not isinstance(text, bool):  # numpy's integers too
        return operator.index(text)
    if isinstance(text, float) and text.is_integer():
        return int(text)
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        return 0
    number, unit, binary = match.groups()
    return int(Decimal(number) * (1024 if binary else 1000) ** (_POWER[unit.lower()] if unit else 0))


def size(nbytes: float) -> str:
    """Return a size in bytes as text: "3.8 MB"."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def gib(nbytes: float | None) -> str:
    """Return a size of memory in bytes as text: "7.8 GiB"; "unknown" for None."""
    return "unknown" if nbytes is None else f"{nbytes / GIB:,.1f} GiB"


def budget_text(nbytes: int) -> str:
    """Return a budget in bytes as users write it, rounded down to hundredths: "5.42GB". `parse_budget` reads it."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if nbytes >= unit:
            return f"{nbytes * 100 // unit / 100:.2f}".rstrip("0").rstrip(".") + name
    return str(nbytes)

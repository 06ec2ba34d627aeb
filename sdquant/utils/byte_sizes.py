"""Sizes in bytes, read and written as people write them: "6GB", "3.8 MB"."""

from __future__ import annotations

import re

from ..errors import SettingsError

GIB = 1 << 30

_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_budget(text: str | int | None) -> int | None:
    """Return a budget in bytes, see `parse_size`; None stays None: the machine decides.

    Raises:
        SettingsError: not a size, or not a positive one.
    """
    return None if text is None else parse_size(text, "A budget")


def parse_size(text: str | int, what: str) -> int:
    """Return a size in bytes: "6GB" -> 6_000_000_000, "512MiB" -> 536_870_912, integers as they are.

    Raises:
        SettingsError: the text is not a positive size; `what` ("A budget") begins the error.
    """
    size: int | None = None
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    elif isinstance(text, str) and (match := _SIZE.fullmatch(text.strip())):
        number, unit, binary = match.groups()
        base = 1024 if binary else 1000
        size = int(float(number) * base ** _POWER[unit.lower()]) if unit else int(float(number))
    if size is None or size <= 0:
        raise SettingsError(
            f"{what} cannot be {text!r}",
            "it is not a size in bytes above zero",
            "Write it like '6GB', '512MB', '4GiB', or as a whole number of bytes",
        )
    return size


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

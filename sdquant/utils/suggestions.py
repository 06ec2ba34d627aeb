"""The name that was probably meant, for the fix of an error about one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most like `name`, or None if the ratio of none (difflib's, 0 to 1) reaches `cutoff`."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def similar(name: str, known: Iterable[str], most: int) -> list[str]:
    """Return up to `most` known names that are like `name`, the most alike first."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=0.5)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, most: int = 1) -> str:
    """Return the fix "Did you mean 'nf4' or 'fp4'?" with up to `most` known names; `otherwise` if none is like it."""
    near = similar(name, known, most)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else otherwise

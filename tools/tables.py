"""A table as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """A table; the first `left` columns left-aligned, the rest right-aligned."""
    header = list(header)
    rule = [":--" if column < left else "--:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def machine_of(kept: Mapping[str, Any]) -> str:
    """What a file of results was measured on, in words."""
    here = kept["machine"]
    return f"{here['cpu']}, instructions `{here['native']}`, torch {kept['versions']['torch']}"

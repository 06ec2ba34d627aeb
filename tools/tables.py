"""A table as Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """A table; the first `left` columns left-aligned, the rest right-aligned."""
    header = list(header)
    rule = [":--" if column < left else "--:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))

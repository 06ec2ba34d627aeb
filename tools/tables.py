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
    built = not here["native"].startswith("not built")  # on machines with a card the C kernels do not matter
    kernels = f"instructions `{here['native']}`" if built else "without the C kernels"
    return f"{here['cpu']}, {kernels}, torch {kept['versions']['torch']}"

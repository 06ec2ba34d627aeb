"""JSON in a few bytes of a file that may be anybody's: one reading or none."""

from __future__ import annotations

import json
from typing import Any


def parse(raw: bytes, *, constants: bool = True) -> Any:
    """The value.

    Args:
        constants: whether NaN and infinities may stand for numbers, which JSON does not have and Python writes.

    Raises:
        ValueError: not UTF-8, not JSON, a key twice in a table (readers disagree on which counts), or nested too deep.
    """
    try:
        # Decoded here: left to itself, `json` would also read UTF-16.
        text = raw.decode("utf-8")
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=None if constants else _no_constants)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return table


def _no_constants(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")

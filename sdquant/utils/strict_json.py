"""Strict JSON parsing of untrusted files: unambiguous, in little more memory than the text itself.

Python takes some sixty bytes for an empty list, which is three bytes in a file, and four bytes for every character of a
text with a single one beyond the first 65536. So values and characters are counted before anything is parsed.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

MOST = 500_000  # values and names; a table of a hundred thousand tensors has not yet been seen in an image model
WIDE = 8 << 20  # bytes of text that has letters outside ASCII


def text(raw: bytes) -> str:
    """Return a file's bytes decoded as UTF-8.

    Raises:
        ValueError: not UTF-8, or large and not ASCII.
    """
    if len(raw) > WIDE and not raw.isascii():
        raise ValueError(f"it has {len(raw)} bytes that are not all ASCII; {WIDE} is the limit")
    return raw.decode("utf-8")  # left to itself, `json` would also read UTF-16


def parse(line: str, *, constants: bool = True, duplicates: bool = False) -> Any:
    """Return the parsed value.

    Args:
        constants: whether NaN and infinities may stand for numbers, which JSON does not have and Python writes.
        duplicates: whether a key may be in a table twice; readers disagree on which counts, and here the last does.

    Raises:
        ValueError: not JSON, nested too deep, or more than a header or config has.
    """
    if len(line) > WIDE and ("\\u" in line or not line.isascii()):
        raise ValueError(f"it has {len(line)} characters that are not all ASCII; {WIDE} is the limit")
    if sum(line.count(mark) for mark in ",:[{") > MOST:
        raise ValueError(f"it has more than {MOST} values")
    try:
        return json.loads(
            line,
            object_pairs_hook=None if duplicates else _no_duplicates,
            parse_constant=None if constants else _no_constants,
        )
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{name!r:.200} appears twice")
    return table


def _no_constants(word: str) -> Any:
    raise ValueError(f"{word} is not valid JSON")

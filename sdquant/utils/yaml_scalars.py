"""Values of unquoted YAML scalars: YAML 1.2's core schema, decimal numbers only.

PyYAML reads YAML 1.1, where `on` and `no` are truth values, 1e-5 is a text, 010 is eight and 1:30 is ninety.
"""

from __future__ import annotations

import re

_NULL = ("", "~", "null", "Null", "NULL")
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]{1,400}", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)


def resolved(text: str) -> bool | int | float | str | None:
    """Return the value of a plain scalar."""
    if text in _NULL:
        return None
    if text in _TRUTH:
        return _TRUTH[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text

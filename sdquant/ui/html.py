"""Escapes text from files (names, metadata, tensor names) for use in a page."""

from __future__ import annotations

import html
import unicodedata

MAX_TEXT = 2000  # characters

# Marks that turn the direction of what follows, which can make a name read as another one.
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def escape(value: object, limit: int = MAX_TEXT) -> str:
    """Return a value as HTML text, safe between tags and in a quoted attribute.

    `<`, `>`, `&` and both quotes become entities, as do backticks and braces, which templates may read. Control
    characters and marks that turn the direction of the text are shown as \\x.. and \\u...., and a text longer than
    `limit` is cut.
    """
    text = str(value)
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    shown = "".join(_shown(letter) for letter in text)
    return html.escape(shown).replace("`", "&#96;").replace("{", "&#123;").replace("}", "&#125;")


def _shown(letter: str) -> str:
    hidden = unicodedata.category(letter) in ("Cc", "Cs") and letter not in "\n\t"
    return letter.encode("unicode_escape").decode("ascii") if hidden or letter in _TURNS else letter

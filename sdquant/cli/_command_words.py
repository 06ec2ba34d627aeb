"""The fixes of errors in the words of the command line: flags for Python's arguments, or a config file's keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_VALUE = r"(?:['\"]([^'\"]*)['\"]|(<[^>]*>)|([\w.:/-]*\w))"
_FLAGS = (
    "offload",
    "runtime",
    "quant",
    "compute",
    "device",
    "mode",
    "dtype",
    "budget",
    "base",
    "variant",
    "cache",
    "skip",
    "size",
    "quality",
    "quant_stats",
    "config",
)
_NAMED = rf"(?<![\w/?&=.-])({'|'.join(_FLAGS)})="  # not in paths and addresses
# What a library says itself, which helps whoever looks for it, but not whoever types commands.
_LIBRARY = re.compile(r"[\w.]+\(\) missing \d+ required positional arguments?: ")


def in_command_words(text: str) -> str:
    """Return a sentence of an error with the arguments of calls in it as flags."""
    return _in_words(text, lambda name, value: f"--{name.replace('_', '-')} {value or ''}".rstrip())


def in_config_words(text: str, keys: Mapping[str, str]) -> str:
    """Return a sentence of an error with the arguments of calls in it as `key=value`, as in a config file's commands.

    Args:
        keys: of the arguments whose names are others, such as quant's.
    """

    def word(name: str, value: str | None) -> str:
        return keys.get(name, name) + ("" if value is None else f"={value}")

    return _in_words(text, word, on="true")


def _in_words(text: str, word: Callable[[str, str | None], str], on: str | None = None) -> str:
    """Return a sentence with arguments written by `word` (name, value). on: the value of a switch that is on."""
    # The first that matches counts.
    words: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
        (r"\b(allow_incompatible|allow_pickle)=True\b", lambda match: word(match[1], on)),
        (r"\bquant=None\b", lambda match: f"no {word('quant', None)}"),
        (rf"{_NAMED}{_VALUE}", lambda match: word(match[1], _value(match[2], match[3], match[4]))),
        (rf"{_NAMED}(?=[\s.,;)]|$)", lambda match: word(match[1], None)),
        (r"\bconfig=(\{[^{}]*\})", lambda match: word("config", f"'{_json(match[1])}'")),
    )
    text = _LIBRARY.sub("", text)
    for pattern, write in words:
        text = re.sub(pattern, write, text)
    return text


def _json(text: str) -> str:
    return text.replace(": True", ": true").replace(": False", ": false")


def _value(quoted: str | None, placeholder: str | None, bare: str | None) -> str:
    if placeholder is not None:
        return "FOLDER" if "folder" in placeholder else placeholder.strip("<>").upper()
    return quoted if quoted is not None else str(bare)

"""The fixes of errors in the words of the command line: flags in place of Python's arguments."""

from __future__ import annotations

import re

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
# The first that matches counts.
_WORDS = (
    (r"\b(allow_incompatible|allow_pickle)=True\b", lambda match: _flag(match[1])),
    (r"\bconfig=(\{[^{}]*\})", lambda match: f"--config '{_json(match[1])}'"),
    (r"\bquant=None\b", lambda match: "no --quant"),
    (rf"{_NAMED}{_VALUE}", lambda match: f"{_flag(match[1])} {_word(match[2], match[3], match[4])}"),
    (rf"{_NAMED}(?=[\s.,;)]|$)", lambda match: _flag(match[1])),
)
# What a library says itself, which helps whoever looks for it, but not whoever types commands.
_LIBRARY = re.compile(r"[\w.]+\(\) missing \d+ required positional arguments?: ")


def in_command_words(text: str) -> str:
    """Return a sentence of an error with the arguments of calls in it as flags."""
    text = _LIBRARY.sub("", text)
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text


def _json(text: str) -> str:
    return text.replace(": True", ": true").replace(": False", ": false")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _word(quoted: str | None, placeholder: str | None, bare: str | None) -> str:
    if placeholder is not None:
        return "FOLDER" if "folder" in placeholder else placeholder.strip("<>").upper()
    return quoted if quoted is not None else str(bare)

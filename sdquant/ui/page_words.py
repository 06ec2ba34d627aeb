"""Words of the page for what errors say to callers of Python, and for names of settings."""

from __future__ import annotations

import re

from . import readings

# What a fix may have, and what the page calls it. The first that matches counts.
_WORDS = (
    (r"`sdquant quantize[^`]*`( --[\w-]+)?|sdquant quantize\b( --[\w-]+)?", "the Convert tab"),
    (r'allow_incompatible(=True|="?on"?)?', "More > Allow incompatible"),
    (r"allow_pickle(=True)?", "More > Allow pickle"),
    (r"offload='none'|offload=\"none\"", "no offload"),
    (r"offload=['\"](\w+)['\"]", r"\1 offload"),
    (r"runtime=['\"](\w+)['\"]", r"the \1 runtime"),
    (r"quant=['\"]?none['\"]?", "Original"),
    (r"quant=None", "as found"),
    (r"quant=['\"]([\w:,.=-]+)['\"]", r"\1"),
    (r"compute=['\"](\w+)['\"]", r"compute \1"),
    (r"device=['\"]([\w:]+)['\"]", r"the device \1"),
    (r"\b(mode|dtype|budget|device|variant|size|quality)=['\"]?([\w.]+)['\"]?", r"\1 \2"),
    (r"\bbase=(<[^>]*>|['\"][^'\"]*['\"]|\S+)", "a base pipeline"),
    (r"\b(runtime|compute|offload|quant|budget|skip|size|quality)=(?=\W|$)", r"\1"),
)
_LIBRARY = re.compile(r"[\w.]+\(\) missing \d+ required positional arguments?: (\w)")  # in its own words
_TABLE = tuple((re.compile(pattern), text) for pattern, text in _WORDS)


def in_page_words(text: str, at: str = "Together with") -> str:
    """Return a sentence of an error with the arguments of calls in it as the page names them.

    Args:
        at: the label of the widget that takes a config.
    """
    text = readings.in_words(_LIBRARY.sub(lambda match: match[1].upper(), text), at)
    for pattern, words in _TABLE:
        text = pattern.sub(words, text)
    return text

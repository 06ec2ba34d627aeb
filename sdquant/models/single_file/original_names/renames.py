"""Layouts that differ from diffusers' in single words: rules for these, for every tensor. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .rows import OutputTensor, Shapes

# (diffusers' word or words, the authors'): whole parts of a name. "^" before them: only where the name begins.
Rules = Sequence[tuple[str, str]]


def renamed(shapes: Shapes, rules: Rules) -> Iterator[OutputTensor]:
    """Yield each tensor alone, with all rules applied to its name in order."""
    patterns = [(re.compile(_pattern(ours)), theirs) for ours, theirs in rules]
    for name in shapes:
        there = name
        for pattern, theirs in patterns:
            there = pattern.sub(theirs, there)
        yield OutputTensor(there, (name,))


def _pattern(words: str) -> str:
    begin = "^" if words.startswith("^") else r"(?<![^.])"
    return begin + re.escape(words.removeprefix("^")) + r"(?![^.])"


def same(shapes: Shapes) -> Iterator[OutputTensor]:
    """Yield the tensors of a model whose authors use diffusers' names."""
    yield from renamed(shapes, ())

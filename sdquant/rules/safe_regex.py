"""Patterns that a file brings: one that takes for ever to match is refused, as nobody can look at it beforehand."""

from __future__ import annotations

import re

LONGEST = 4000  # characters
MOST = 4  # repetitions in one alternative: a path of n characters takes n**4 steps at worst

# A character that is escaped, or in brackets, is none of those that repeat or group.
_PLAIN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{)")
_REPEATS = re.compile(r"[*+]|\{|(?<!\()\?")


def quick(pattern: str) -> bool:
    """Whether matching a path cannot take for ever: no repeated groups, and few repetitions in each alternative."""
    if len(pattern) > LONGEST:
        return False
    bare = _PLAIN.sub("x", pattern)
    if _REPEATED_GROUP.search(bare):
        return False
    return all(len(_REPEATS.findall(part)) <= MOST for part in bare.split("|"))

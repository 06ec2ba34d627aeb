"""Which patterns out of files match fast: nobody has reviewed them, and some would take for ever to match."""

from __future__ import annotations

import re

LONGEST = 4000  # characters
MOST = 4  # repetitions in one alternative: a path of n characters takes n**4 steps at worst

# Escaped characters and character classes neither repeat nor group.
_PLAIN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{)")
_REPEATS = re.compile(r"[*+]|\{|(?<!\()\?")


def quick(pattern: str) -> bool:
    """Return whether matching is fast on every path: no repeated groups, and few repetitions in each alternative."""
    if len(pattern) > LONGEST:
        return False
    bare = _PLAIN.sub("x", pattern)
    if _REPEATED_GROUP.search(bare):
        return False
    return all(len(_REPEATS.findall(part)) <= MOST for part in bare.split("|"))

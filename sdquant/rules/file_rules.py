"""The rules in a file that sdquant wrote, read back with every field checked.

Nobody has reviewed patterns from files, and some would take for ever to match: `quick` finds those that do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core import registry
from ..errors import BadFileError, SettingsError
from ..formats import sdquant_metadata
from .qconfig import rule_of
from .quant_spec import RulesSpec, with_rules

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


def rules_in(file: Path, rows: tuple[Mapping[str, Any], ...]) -> RulesSpec | None:
    """Return the rules that a model was quantized by; None if the file has none.

    Args:
        rows: see `sdquant_metadata.rule_rows`.

    Raises:
        BadFileError: a row is not a rule, or its pattern could take for ever to match.
    """
    if not rows:
        return None
    slow = [row["module_path"] for row in rows if not quick(str(row.get("module_path", "")))]
    if slow:
        raise BadFileError(
            f"Cannot read {file}",
            f"one of its rules is for {slow[0]!r:.80}, a pattern that could take for ever to match",
            "Quantize the model again with simpler patterns: no repeated groups, and at most four repetitions",
        )
    try:
        return with_rules(registry.parse("rules"), tuple(rule_of(dict(row)) for row in rows))
    except (SettingsError, TypeError) as error:
        raise sdquant_metadata.damaged(file, f"its rules are not valid: {error}") from error

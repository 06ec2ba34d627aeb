"""The rules in a file that sdquant wrote, read back with every field checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core import registry
from ..errors import BadFileError, SettingsError
from ..formats import sdquant_metadata
from ..utils.quick_patterns import quick
from .qconfig import rule_of
from .quant_spec import RulesSpec, with_rules


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

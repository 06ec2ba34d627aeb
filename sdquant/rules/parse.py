"""Rules as users write them: objects, mappings, JSON text, or a YAML or JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from .qconfig import QuantizationRule, rule_of

_FIX = 'Pass a list such as [{"module_path": ".*attn.*", "weight_qtype": "int8"}]'


def rules_of(value: Any) -> tuple[QuantizationRule, ...] | None:
    """Parse the value of `rules=`; None stays None.

    Raises:
        SettingsError: there are no rules in it, or a file cannot be read.
    """
    if value is None:
        return None
    if isinstance(value, os.PathLike) or (isinstance(value, str) and not value.lstrip().startswith(("[", "{"))):
        value = _read(Path(os.path.expanduser(os.fspath(value))))
    elif isinstance(value, str):
        value = _json(value, "rules")
    if isinstance(value, Mapping) and value:
        value = value.get("rules", [value])
    if isinstance(value, QuantizationRule):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise SettingsError(f"Invalid rules={value!r:.80}", "rules must be a list that is not empty", _FIX)
    return tuple(_rule(row) for row in value)


def _rule(row: Any) -> QuantizationRule:
    if isinstance(row, QuantizationRule):
        return row
    if isinstance(row, Mapping) and all(isinstance(name, str) for name in row):
        return rule_of(dict(row))
    raise SettingsError(f"Invalid rule {row!r:.80}", "a rule must be a mapping of field names to values", _FIX)


def _read(path: Path) -> Any:
    from ..utils import strict_yaml

    what = f"Cannot read rules={str(path)!r}"
    text = strict_yaml.text_of(path, what)
    return _json(text, str(path)) if path.suffix == ".json" else strict_yaml.value(text, what)


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"Cannot parse {name} as JSON", f"it is not valid JSON: {error}", _FIX) from error

"""What a person can say of a file that does not say how it is quantized: the choices for it below "Together with".

An error names them as `config={...}`; the page shows each as a few words, and hands on the JSON.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..formats import component_configs

if TYPE_CHECKING:
    from ..errors import SdquantError

MAX_TEXT = 10_000  # characters of a config


def readings(error: SdquantError) -> dict[str, str]:
    """Return the configs that an error names: what the page calls each, and its JSON."""
    configs = (_config(match[1]) for match in re.finditer(component_configs.NAMED, error.fix))
    return {label(config): json.dumps(config) for config in configs if config}


def label(config: Mapping[str, Any]) -> str:
    """Return a few words for a config: "Read it as comfyui, int8_tensorwise, convrot"."""
    return "Read it as " + ", ".join(_words(name, value) for name, value in config.items())


def is_config(name: str) -> bool:
    """Return whether a choice is a config, as text or a file, and no model."""
    return is_text(name) or name.lower().endswith(".json")


def is_text(name: str) -> bool:
    """Return whether a choice is a config as text."""
    return name.startswith("{") and len(name) <= MAX_TEXT


def in_words(text: str, at: str) -> str:
    """Return a sentence of an error with the page's choices for the configs in it. at: the label of their widget."""

    def choice(match: re.Match[str]) -> str:
        config = _config(match[1])
        return f"“{label(config)}” at {at}" if config else match[0]

    return re.sub(component_configs.NAMED, choice, text)


def _config(text: str) -> dict[str, Any]:
    """Return a config as errors write it; {} for any other text."""
    try:
        config = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {}
    return config if isinstance(config, dict) and all(isinstance(name, str) for name in config) else {}


def _words(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(_words(*row) for row in value.items())
    if isinstance(value, list):
        return ", ".join(_words(name, one) for one in value)
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return value if isinstance(value, str) else f"{name} {value}"

"""Limits on the numbers in configs, against endless models. JSON values only, no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import BadFileError

# What a constructor goes through one by one, or makes a table of, and more than any model has: a billion never ends.
_MOST: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"layers|blocks|depth|stages|timesteps"), 10_000),
    (re.compile(r"position"), 1 << 24),
)
_ITEMS = 10_000  # of a list
_INT = (1 << 62) - 1  # of a whole number: torch counts in 64 bits
_COUNT = re.compile(r"(^|[._])n(um)?_\w*(layers?|blocks|heads)$")
_DEEPEST = 16  # tables in tables


def refuse_endless(name: str, config: Mapping[str, Any]) -> None:
    """Raise BadFileError if a config, or a table in it, has more layers or positions than any model has, or a scheduler
    more steps.

    Args:
        name: the class that is built from it, for the error.
    """
    for key, value in _entries(config):
        counts = value if isinstance(value, list | tuple) else (value,)
        most = min((limit for words, limit in _MOST if words.search(key)), default=math.inf)
        large = [n for n in counts if isinstance(n, int | float) and (n > most or (isinstance(n, int) and n > _INT))]
        if _COUNT.search(key) and isinstance(value, int) and value < 0:
            raise BadFileError(
                f"Cannot build {name}",
                f"its config has {key} = {value}, which cannot be negative",
                "Get the config.json that belongs to the weights",
            )
        if large or len(counts) > _ITEMS:
            raise BadFileError(
                f"Cannot build {name}",
                f"its config has {key} = {large[0] if large else f'a list of {len(counts)}'}, more than any model has",
                "Get the config.json that belongs to the weights",
            )


def config_numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield all positive integers in a config, each with its key: "text_config.vocab_size"."""
    for key, value in _entries(config):
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                yield key, number


def _entries(config: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if not isinstance(value, Mapping):
            yield f"{prefix}{key}", value
        elif depth < _DEEPEST:
            yield from _entries(value, f"{prefix}{key}.", depth + 1)

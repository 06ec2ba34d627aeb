"""Configs for the shipped models, each key with a line of comment."""

from __future__ import annotations

from pathlib import Path

from ....errors import SettingsError

EXAMPLES = ("digits-sd", "digits-flux", "digits-train")


def path(name: str) -> Path:
    """The file of an example.

    Raises:
        SettingsError: there is no such example.
    """
    if name not in EXAMPLES:
        raise SettingsError(
            f"Unknown example {name!r}", f"the examples are {', '.join(EXAMPLES)}", "Choose one of them"
        )
    return Path(__file__).parent / f"{name}.yml"

"""Key: a row of the table of config keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMMANDS = ("generate", "train")

# Whose name it is.
MAXDIFFUSION, OURS = "MaxDiffusion", "sdquant"


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a config file, from which reading, checking, listing and the commented file are derived.

    Attributes:
        kind: name of a row of `value_types.KINDS`, which defines its values. If the default is None, null is allowed
            too.
        help: a part of a sentence.
        commands: those that use it.
        origin: MAXDIFFUSION if the name and meaning are MaxDiffusion's, else OURS.
        field: name of the field of `Request` that it becomes; "" if none.
        choices: all its values; () if there are too many.
        least, most: inclusive bounds of a number.
        check: raises SettingsError for a value that the kind allows but the key does not.
    """

    name: str
    kind: str
    default: Any
    help: str
    commands: tuple[str, ...] = COMMANDS
    origin: str = OURS
    field: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    check: Callable[[Any], object] | None = None

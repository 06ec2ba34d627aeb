"""What a row of the table of keys is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMMANDS = ("generate", "train")

# Whose name it is.
MAXDIFFUSION, OURS = "MaxDiffusion", "sdquant"


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a config file. Reading, checking, listing and the commented file are all made from this.

    Attributes:
        kind: name of a row of `kinds.KINDS`, which says what values it has. Where the default is None, null is one of
            them, and the kind is that of the others.
        help: a part of a sentence.
        commands: those that use it.
        origin: MAXDIFFUSION where the name and meaning are MaxDiffusion's, else OURS.
        field: name of the field of `Request` that it becomes; "" if none.
        choices: all its values; () if there are too many.
        least, most: bounds of a number, themselves allowed.
        check: raises SettingsError for a value that the kind allows and the key does not.
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

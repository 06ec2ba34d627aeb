"""Fields of the settings page: a scheme for each role, then every field of Request that is a setting.

The page shows a widget for each, by its kind; new schemes, roles and fields of Request appear automatically.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..core import registry
from ..errors import SettingsError
from .component_types import ROLES
from .request import NOT_QUANTIZED, Request

KINDS = ("scheme", "choice", "switch", "text", "list")

# Texts that widgets show for None.
AS_FOUND = "as found"
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class Field:
    """One setting.

    Attributes:
        name: "quant.<role>" for a scheme, else the name of Request's field.
        label, help: texts next to the widget.
        kind: "scheme" (one of `choices` or one with options, as "nf4,double_quant"), "choice" (one of them), "switch"
            (a bool), "text" (empty is None) or "list" (comma-separated names).
        choices: as a widget shows them; the first stands for None if None is allowed.
        default: the value if nothing is set.
    """

    name: str
    label: str
    help: str
    kind: str
    choices: tuple[str, ...] = ()
    default: Any = None

    def shown(self, value: Any) -> Any:
        """Return a value as its widget shows it."""
        if self.kind == "list":
            return ", ".join(value)
        if value is None:
            return self.choices[0] if self.choices else ""
        return value

    def parse(self, shown: Any) -> Any:
        """Parse the content of a widget.

        Raises:
            SettingsError: a value that no widget of this kind can have.
        """
        if self.kind == "switch":
            if isinstance(shown, bool):
                return shown
            raise SettingsError(f"Invalid {self.name}={shown!r}", f"{self.name} is on or off", "Use true or false")
        if isinstance(shown, (int, float)) and not isinstance(shown, bool) and self.kind == "text":
            return shown
        if shown is None:
            shown = ""
        if self.kind == "list" and isinstance(shown, (list, tuple)):
            shown = ",".join(str(word) for word in shown)
        if not isinstance(shown, str):
            raise SettingsError(f"Invalid {self.name}={shown!r}", f"{self.name} must be a string", "Use a string")
        words = shown.strip()
        if self.kind == "list":
            return tuple(word.strip() for word in words.split(",") if word.strip())
        if self.default is None and (not words or (self.choices and words == self.choices[0])):
            return None
        return words or self.default


@lru_cache(maxsize=1)
def fields() -> tuple[Field, ...]:
    """Return all fields, in the order of the page."""
    return (*_schemes(), *_of_request())


def field_named(name: str) -> Field:
    """Return the field of this name.

    Raises:
        SettingsError: there is none.
    """
    for row in fields():
        if row.name == name:
            return row
    raise SettingsError(
        f"Unknown setting {name!r}", f"the settings are {', '.join(row.name for row in fields())}", "Use one of them"
    )


def _schemes() -> tuple[Field, ...]:
    choices = (AS_FOUND, NOT_QUANTIZED, *(row.name for row in registry.schemes() if row.on_the_fly))
    return tuple(
        Field(
            name=f"quant.{role.name}",
            label=role.label,
            help=f"scheme of the {_lower(role.label)}",
            kind="scheme",
            choices=choices,
        )
        for role in ROLES
    )


def _lower(label: str) -> str:
    return label if label[:2].isupper() else label[:1].lower() + label[1:]


def _of_request() -> tuple[Field, ...]:
    rows = []
    for row in dataclasses.fields(Request):
        if not row.metadata["setting"] or row.name == "quant":
            continue
        choices, default = tuple(row.metadata["choices"]), row.default
        if isinstance(default, bool):
            kind = "switch"
        elif isinstance(default, tuple):
            kind = "list"
        else:
            kind = "choice" if choices else "text"
        if kind == "choice" and default is None:
            choices = (DEFAULT, *choices)
        label = row.name.replace("_", " ").capitalize()
        rows.append(
            Field(name=row.name, label=label, help=row.metadata["help"], kind=kind, choices=choices, default=default)
        )
    return tuple(rows)

"""Settings: a value for each field of the settings page, validated like the arguments of `load_model`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..core import AUTO
from ..errors import SettingsError
from .component_types import ROLES, is_quantized_by_default, role_of
from .request import NOT_QUANTIZED, Request, make_request
from .settings_fields import field_named, fields

_PREFIX = "quant."
_NO_PATH = "-"  # settings are checked before any model is chosen


@dataclass(frozen=True)
class Settings:
    """All settings; missing ones have their default.

    Attributes:
        values: name of a field to its value, as `load_model` takes it ("quant.model": "nf4", "offload": "balanced").

    Raises:
        SettingsError, UnknownQuantError, UnknownOffloadError: an unknown setting or an invalid value.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise SettingsError("Invalid settings", "they are not name and value", "Pass a mapping of names to values")
        parsed = {name: _given(name, value) for name, value in self.values.items()}
        whole = {row.name: parsed.get(row.name, row.default) for row in fields()}
        object.__setattr__(self, "values", MappingProxyType(whole))
        self.request(_NO_PATH, [role.name for role in ROLES])

    def __getitem__(self, name: str) -> Any:
        """Return the value of a field. Raises KeyError if there is no such field."""
        return self.values[name]

    def __hash__(self) -> int:
        return hash(tuple(self.values.items()))

    def but(self, changes: Mapping[str, Any]) -> Settings:
        """Return a copy with `changes` (field name to value)."""
        return Settings({**self.values, **changes})

    def request(self, path: str, components: Iterable[str], **call: Any) -> Request:
        """Build the Request for the model at `path`.

        Args:
            components: names of its components ("unet", "text_encoder", ...; "model" or a role's own name if the
                model is a single component).
            call: arguments of this call only (base, parts, variant, progress).

        Raises:
            SdquantError: as `make_request` does.
        """
        schemes = {}
        for name in components:
            role = role_of(name)
            scheme = self.values[_PREFIX + role.name] if role is not None else None
            if scheme is not None:
                schemes[name] = scheme
        others = {name: value for name, value in self.values.items() if not name.startswith(_PREFIX)}
        if others["size"] is not None or others["quality"] is not None:
            return make_request(path, quant=AUTO, components=_mixed(schemes, components), **others, **call)
        return make_request(path, quant=schemes or None, **others, **call)

    def to_dict(self) -> dict[str, Any]:
        """Return the values that differ from the defaults, as JSON values."""
        return {
            row.name: list(value) if isinstance(value := self.values[row.name], tuple) else value
            for row in fields()
            if self.values[row.name] != row.default
        }


def _mixed(schemes: Mapping[str, str], components: Iterable[str]) -> tuple[str, ...] | None:
    """Return the components that a mix is chosen for; None for those that are quantized by default.

    Args:
        schemes: what is set for components; NOT_QUANTIZED leaves one as it is.
    """
    for name, scheme in schemes.items():
        if scheme.lower() != NOT_QUANTIZED:
            raise SettingsError(
                f"Cannot use size or quality with {scheme} for {name}",
                "they choose a scheme for each weight",
                "Leave its scheme as found, or remove size and quality",
            )
    return (
        tuple(name for name in components if is_quantized_by_default(name) and name not in schemes) if schemes else None
    )


def _given(name: object, value: Any) -> Any:
    row = field_named(str(name))
    value = row.parse(row.shown(value)) if row.kind != "list" or isinstance(value, (list, tuple)) else row.parse(value)
    return value

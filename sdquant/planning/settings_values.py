"""Settings: a value for each field of a settings page, checked as `load_model` checks its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..errors import SettingsError
from .component_types import ROLES, role_of
from .request import Request, request
from .settings_fields import field_named, fields

_PREFIX = "quant."
_NO_PATH = "-"  # settings are checked before any model is chosen


@dataclass(frozen=True)
class Settings:
    """All settings; what is not given has its default.

    Attributes:
        values: name of a field to its value, as `load_model` takes it ("quant.model": "nf4", "offload": "balanced").

    Raises:
        SettingsError, UnknownQuantError, UnknownOffloadError: a name that is no setting, or a value it cannot have.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise SettingsError("Settings were given", "they are not name and value", "Give a mapping")
        given = {name: _given(name, value) for name, value in self.values.items()}
        whole = {row.name: given.get(row.name, row.default) for row in fields()}
        object.__setattr__(self, "values", MappingProxyType(whole))
        self.request(_NO_PATH, [role.name for role in ROLES])

    def __getitem__(self, name: str) -> Any:
        """The value of a field. Raises KeyError if there is no such field."""
        return self.values[name]

    def __hash__(self) -> int:
        return hash(tuple(self.values.items()))

    def but(self, changes: Mapping[str, Any]) -> Settings:
        """These settings with `changes` (field name to value)."""
        return Settings({**self.values, **changes})

    def request(self, path: str, components: Iterable[str], **call: Any) -> Request:
        """The Request for the model at `path`.

        Args:
            components: names of its components ("unet", "text_encoder", ...; "model" or a role's own name where the
                model is one component alone).
            call: what belongs to this call alone (base, parts, variant, progress).

        Raises:
            SdquantError: as `sdquant.planning.request.request` does.
        """
        chosen = {}
        for name in components:
            role = role_of(name)
            scheme = self.values[_PREFIX + role.name] if role is not None else None
            if scheme is not None:
                chosen[name] = scheme
        others = {name: value for name, value in self.values.items() if not name.startswith(_PREFIX)}
        return request(path, quant=chosen or None, **others, **call)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: what differs from the defaults."""
        return {
            row.name: list(value) if isinstance(value := self.values[row.name], tuple) else value
            for row in fields()
            if self.values[row.name] != row.default
        }


def _given(name: object, value: Any) -> Any:
    row = field_named(str(name))
    value = row.parse(row.shown(value)) if row.kind != "list" or isinstance(value, (list, tuple)) else row.parse(value)
    return value

"""Config: a value for every key, that cannot be changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from ...utils.suggestions import nearest
from .value_types import format_value


class RunConfig:
    """A value for every key, as attributes: `config.output_dir`. Lists are tuples.

    Attributes:
        source: path of the file; "" if none.
        command: that it was read for.
        given: names of the keys that the file or an override has set, and which of the two it was.
    """

    __slots__ = ("_values", "command", "given", "source")

    source: str
    command: str
    given: Mapping[str, str]
    _values: Mapping[str, Any]

    def __init__(
        self, values: Mapping[str, Any], *, source: str = "", command: str = "", given: Mapping[str, str] | None = None
    ) -> None:
        put = object.__setattr__
        put(self, "_values", MappingProxyType({name: _frozen(value) for name, value in values.items()}))
        put(self, "source", source)
        put(self, "command", command)
        put(self, "given", MappingProxyType(dict(given or {})))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        near = nearest(name, self._values)
        raise AttributeError(f"a config has no key {name!r}" + (f"; did you mean {near!r}?" if near else ""))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} cannot be set: a config is read-only")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} cannot be deleted: a config is read-only")

    def __getitem__(self, name: str) -> Any:
        """The value of a key. Raises KeyError if there is no such key."""
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.to_yaml())

    def __repr__(self) -> str:
        return f"Config({self.source or 'defaults'}: {', '.join(f'{n}={format_value(self[n])}' for n in self.given)})"

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(RunConfig, source=self.source, command=self.command, given=dict(self.given))
        return make, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """All keys, as JSON values."""
        return {name: _thawed(value) for name, value in self._values.items()}

    def to_yaml(self) -> str:
        """A file that gives the same values: the keys of the command, one a line, each with its help."""
        from .keys import key

        lines = []
        for name, value in self._values.items():
            if not self.command or self.command in key(name).commands:
                lines += [f"# {key(name).help}", f"{name}: {format_value(_thawed(value))}"]
        return "\n".join(lines) + "\n"


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({name: _frozen(one) for name, one in value.items()})
    return tuple(_frozen(one) for one in value) if isinstance(value, (list, tuple)) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _thawed(one) for name, one in value.items()}
    return [_thawed(one) for one in value] if isinstance(value, (list, tuple)) else value

"""Suggest the nearest settings that work for a refused choice, for the buttons of a settings page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core import NO_OFFLOAD, registry
from ..errors import SdquantError
from ..offload import MODES, mode_named
from ..planning import AUTO, NOT_QUANTIZED, ROLES, Settings, field_named

_LONGEST = 30  # characters of a name that there is none of, on a button


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A suggested change. `text`: label for a button; `changes`: field name to its new value."""

    text: str
    changes: Mapping[str, Any]


def fixes(values: Mapping[str, Any], accepts: Callable[[Settings], bool], *, most: int = 3) -> tuple[Fix, ...]:
    """Return changes of `values` that `accepts` allows: at most one of each kind, the smallest change first.

    Of a scheme that there is none of, all that it may have been meant for come first.

    Args:
        values: a value for each field; they may contradict each other.
        accepts: returns whether settings would load, as far as that is known before weights are read.
        most: maximum number of changes.
    """
    suggestions = [fix for fix in _of_like_name(values) if _would(values, fix, accepts)][:most]
    for kind in (
        _another_offload, _another_runtime, _another_mode, _another_scheme, _as_found, _unlimited, _unmixed,
        _default_device,
    ):  # fmt: skip
        if len(suggestions) == most:
            break
        fix = next((row for row in kind(values) if _would(values, row, accepts)), None)
        if fix is not None:
            suggestions.append(fix)
    return tuple(suggestions)


def _would(values: Mapping[str, Any], fix: Fix, accepts: Callable[[Settings], bool]) -> bool:
    try:
        return accepts(Settings({**values, **fix.changes}))
    except SdquantError:  # what contradicts itself is no way out
        return False


def _of_like_name(values: Mapping[str, Any]) -> Iterator[Fix]:
    """Yield the schemes with a name like one that there is none of, with its options."""
    schemes = _held(values)
    for old in dict.fromkeys(schemes.values()):
        head, comma, options = old.partition(",")
        if head.strip().lower() != AUTO and not _is_known(head):
            for name in registry.near(head):
                changes = {field: f"{name}{comma}{options}" for field, value in schemes.items() if value == old}
                yield Fix(text=f"Use {name} instead of {head.strip()[:_LONGEST]}", changes=changes)


def _is_known(name: str) -> bool:
    try:
        registry.scheme(name)
    except SdquantError:
        return False
    return True


def _another_offload(values: Mapping[str, Any]) -> Iterator[Fix]:
    """Yield the other modes, those that need little memory first, fast ones before slow ones; the slowest is the last
    resort after no offload."""
    *moving, slowest = (mode.name for mode in sorted(MODES, key=lambda mode: mode.order) if mode.name != NO_OFFLOAD)
    for name in (*moving, NO_OFFLOAD, slowest, AUTO):
        if name != values["offload"]:
            keeps = name != AUTO and mode_named(name).takes_budget
            text = f"Use {name} offload" if name != NO_OFFLOAD else "Use no offload"
            yield Fix(text=text, changes={"offload": name} | ({} if keeps else {"budget": None}))


def _another_runtime(values: Mapping[str, Any]) -> Iterator[Fix]:
    for name in ("plain", None):
        if name != values["runtime"]:
            yield Fix(text=f"Use the {name or 'default'} runtime", changes={"runtime": name})


def _another_mode(values: Mapping[str, Any]) -> Iterator[Fix]:
    for name in field_named("mode").choices:
        if name != values["mode"]:
            yield Fix(text=f"Use mode {name}", changes={"mode": name})


def _another_scheme(values: Mapping[str, Any]) -> Iterator[Fix]:
    """Yield replacements for each scheme in use by schemes of other backends, nearest number of bits first."""
    schemes = _held(values)
    for old in dict.fromkeys(schemes.values()):
        try:
            scheme = registry.parse(old).scheme
        except SdquantError:  # no such scheme: nothing is near it
            continue
        others = [row for row in registry.schemes() if row.on_the_fly and row.backend != scheme.backend]
        for other in sorted(others, key=lambda row: abs(row.bits - scheme.bits)):
            changes = {name: other.name for name, value in schemes.items() if value == old}
            yield Fix(text=f"Use {other.name} instead of {scheme.name}", changes=changes)


def _as_found(values: Mapping[str, Any]) -> Iterator[Fix]:
    """Yield changes that load components as found, for files that are already quantized."""
    names = [f"quant.{row.name}" for row in ROLES if values[f"quant.{row.name}"] is not None]
    for name in names:
        yield Fix(text=f"Take the {field_named(name).label} as found", changes={name: None})
    if len(names) > 1:
        yield Fix(text="Take all as found", changes=dict.fromkeys(names))


def _unlimited(values: Mapping[str, Any]) -> Iterator[Fix]:
    if values["budget"] is not None:
        yield Fix(text="Use no budget", changes={"budget": None})


def _unmixed(values: Mapping[str, Any]) -> Iterator[Fix]:
    mixed = [name for name in ("size", "quality") if values[name] is not None]
    for name in mixed:
        yield Fix(text=f"Use no {name}", changes={name: None})
    schemes = [f"quant.{row.name}" for row in ROLES if values[f"quant.{row.name}"] is not None]
    if mixed and schemes:
        yield Fix(text="Let the size choose all schemes", changes=dict.fromkeys(schemes))


def _default_device(values: Mapping[str, Any]) -> Iterator[Fix]:
    if values["device"] is not None:
        yield Fix(text="Use the default device", changes={"device": None})


def _held(values: Mapping[str, Any]) -> dict[str, str]:
    """Return field name to scheme for the roles that are quantized."""
    schemes = {f"quant.{row.name}": values[f"quant.{row.name}"] for row in ROLES}
    return {name: value for name, value in schemes.items() if value is not None and value.lower() != NOT_QUANTIZED}

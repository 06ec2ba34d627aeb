"""Every scheme for a model at hand: its size, whether it fits, how good and fast it is, or why it cannot be had.

    scheme_table("flux", Settings({"offload": "balanced"}), hardware.probe()).rows

For a person who chooses by these, on the page or the command line. Only headers are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core import registry
from ..errors import SdquantError
from ..offload import MODES, mode_named
from ..utils.byte_sizes import parse_budget
from . import resolve
from .candidates import CHOSEN, GOOD, Candidate, open_model, worst_of
from .choice_verdicts import VERDICTS, Verdict, verdict_on
from .estimate.activation_allowance import allowance
from .estimate.image_quality import Grade, Measured, grade, measured
from .request import AUTO, NOT_QUANTIZED, RULES

if TYPE_CHECKING:
    from ..compat import Machine
    from ..core import Scheme
    from ..models import Trace
    from .candidates import Opened
    from .plan import Plan
    from .settings_values import Settings


@dataclass(frozen=True, kw_only=True)
class SchemeRow:
    """What a scheme would mean for the model.

    Attributes:
        scheme: its name; NOT_QUANTIZED for the original.
        group: name of a row of GROUPS.
        summary: what it is, in a line.
        bytes: size of the whole model; None if the scheme has to be made elsewhere.
        fit: "whole", "parts" (weights take turns on the device), "no", or "" if unknown; with the settings' offload.
        offload: the mode that moves least of those with which it fits; "" if it fits with none, or that is unknown.
        moved: bytes that this mode copies to the device in every step.
        measured: image quality and times. grade: stars of that quality; None if it was not measured.
        speed: time of a step relative to the original; None if unknown.
        verdict: of the matrix; why: the reason, and fix: a way out, of one that is not "works".
        praise: what it is the best choice for: texts of PRAISE.
    """

    scheme: str
    group: str
    summary: str
    bits: float
    bytes: int | None = None
    fit: str = ""
    offload: str = ""
    moved: int = 0
    measured: Measured = field(default_factory=Measured)
    grade: Grade | None = None
    speed: float | None = None
    verdict: str = "works"
    why: str = ""
    fix: str = ""
    praise: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Return whether it cannot be chosen with the other settings."""
        return self.verdict == "breaks"


@dataclass(frozen=True, kw_only=True)
class SchemeTable:
    """All schemes for a model.

    Attributes:
        bytes: size of the model as it is. room: bytes for weights on the device; None if unknown.
        device: torch's name of it. offload: the mode. components: names of the model's.
    """

    rows: tuple[SchemeRow, ...]
    bytes: int
    room: int | None
    device: str
    offload: str
    components: tuple[str, ...] = ()

    @property
    def recommended(self) -> tuple[SchemeRow, ...]:
        """Return the rows that are the best choice for something."""
        return tuple(row for row in self.rows if row.praise)


@dataclass(frozen=True, kw_only=True)
class SchemeGroup:
    """A part of the table. `least`: bits of a weight, for schemes that sdquant makes while it loads."""

    name: str
    title: str
    least: float | None = None


GROUPS = (
    SchemeGroup(name="original", title="Original"),
    SchemeGroup(name="8-bit", title="8-bit", least=7),
    SchemeGroup(name="4-bit", title="4 to 6 bits", least=4),
    SchemeGroup(name="smaller", title="Smaller", least=0),
    SchemeGroup(name="files", title="Files of other tools"),
)


@dataclass(frozen=True, kw_only=True)
class Praise:
    """Something that people choose by: `stars` at least, and of those rows the least by `key`."""

    text: str
    stars: int
    key: Callable[[SchemeRow], float | None]


PRAISE = (
    Praise(text="Looks like the original", stars=5, key=lambda row: row.bytes),
    Praise(text="Close to the original", stars=4, key=lambda row: row.bytes),
    Praise(text="Smallest", stars=3, key=lambda row: row.bytes),
    Praise(text="Fastest", stars=3, key=lambda row: row.speed),
)

SORTS: Mapping[str, tuple[str, Callable[[SchemeRow], Any]]] = {
    "name": ("Name", lambda row: row.scheme),
    "size": ("Size", lambda row: row.bytes if row.bytes is not None else float("inf")),
    "quality": ("Quality", lambda row: -(row.measured.snr if row.measured.snr is not None else float("-inf"))),
    "speed": ("Speed", lambda row: row.speed if row.speed is not None else float("inf")),
}


def scheme_table(
    path: Any,
    settings: Settings,
    machine: Machine,
    *,
    roles: Sequence[str] = CHOSEN,
    held: int = 0,
    trace: Callable[[Plan], Mapping[str, Trace | None] | None] | None = None,
    opened: Opened | None = None,
    **call: Any,
) -> SchemeTable:
    """Return all schemes for a model with the other settings as they are.

    Args:
        settings: schemes in it are ignored. roles: those that get the scheme.
        held: bytes on the device that are in use now but will be free. call: arguments of this call only (base, ...).
        trace: traces a plan, for predicted times; None for `meta_models.trace_if_sound`, which takes a second or more.
            What returns None leaves the times unknown.
        opened: the model, if its headers have been read already.

    Raises:
        SdquantError: the model cannot be loaded, with any scheme.
    """
    opened = opened or open_model(path, settings, machine, call)
    return _Table(opened, settings, tuple(role for role in roles if opened.playing(role)), held, trace).made()


class _Table:
    """What the rows of a table share."""

    def __init__(
        self, opened: Opened, settings: Settings, roles: tuple[str, ...], held: int, trace: Callable[[Plan], Any] | None
    ) -> None:
        self.opened, self.settings, self.roles = opened, settings, roles
        self.original = opened.plan({})
        self.on_disk = {
            part.name: part.scheme for part in self.original.components if part.scheme and part.action == "found"
        }
        self.room = self._room(held)
        self.traced = self._traced(trace)

    def made(self) -> SchemeTable:
        """Return the table."""
        original = SchemeRow(
            scheme=NOT_QUANTIZED, group="original", summary="as it is on disk", bits=16,
            bytes=self.original.bytes, fit=self._fit(self.original), speed=1.0, **self._way(self.original, None),
        )  # fmt: skip
        rows = [original, *(self._row(one) for one in registry.schemes() if one.name != RULES)]
        return SchemeTable(
            rows=tuple(_praised(rows)), bytes=self.original.bytes, room=self.room,
            device=self.original.device, offload=self.settings["offload"], components=self.opened.names,
        )  # fmt: skip

    def _row(self, scheme: Scheme) -> SchemeRow:
        known = measured(scheme.name)
        row = SchemeRow(
            scheme=scheme.name, group=_group(scheme), summary=scheme.summary, bits=float(scheme.bits),
            measured=known, grade=None if known.snr is None else grade(known.snr),
        )  # fmt: skip
        verdict = self._verdict(scheme)
        row = dataclasses.replace(row, verdict=verdict.verdict, why=verdict.why, fix=verdict.fix)
        try:
            plan = self.opened.plan(dict.fromkeys(self.roles, scheme.name))
        except SdquantError as error:
            if row.refused:
                return row
            return dataclasses.replace(row, verdict="breaks", why=error.why, fix=error.fix)
        return dataclasses.replace(
            row, bytes=plan.bytes, fit=self._fit(plan), speed=None if row.refused else self._speed(plan, known),
            **self._way(plan, scheme.name),
        )  # fmt: skip

    def _verdict(self, scheme: Scheme) -> Verdict:
        components = [f"the {name} ({old})" for name, old in self.on_disk.items() if self._touches(name)]
        if components:
            why = f"{' and '.join(components)} is quantized already"
            return Verdict(verdict="breaks", why=why, fix="Choose the original file, or convert this one")
        return verdict_on(self.settings.values, scheme.name, None, self.opened.kind, self.opened.machine)

    def _touches(self, component: str) -> bool:
        return any(component in self.opened.playing(role) for role in self.roles)

    def _room(self, held: int) -> int | None:
        free = self.opened.machine.device(self.opened.resolved.device).memory_free
        budget = parse_budget(self.settings["budget"])
        if free is None:
            return budget
        whole = sum(part.bytes_bf16 for part in self.original.components)
        room = max(0, free + held - allowance(whole))
        return room if budget is None else min(room, budget)

    def _fit(self, plan: Plan) -> str:
        if self.room is None:
            return ""
        if plan.bytes <= self.room:
            return "whole"
        way = _way(plan)
        named = self.settings["offload"]
        needed = way.least if named == AUTO else way.needed(mode_named(named))
        return "parts" if needed is None or needed <= self.room else "no"

    def _way(self, plan: Plan, scheme: str | None) -> dict[str, Any]:
        """Return `offload` and `moved` of a row."""
        if self.room is None:
            return {}
        way, found = _way(plan), resolve.prequantized_schemes(self.opened.resolved.detected)
        for mode in sorted(MODES, key=lambda mode: mode.order):
            needed = way.needed(mode)
            if needed is None or needed > self.room:
                continue
            verdicts = [self.opened.verdict(s, mode.name, prequantized=True, plain_only=p) for s, p in found]
            verdicts += [self.opened.verdict(scheme, mode.name, prequantized=False)] if scheme else []
            if worst_of(verdicts) in GOOD:
                return {"offload": mode.name, "moved": mode.each_step(way.largest, self.room)}
        return {}

    def _traced(self, trace: Callable[[Plan], Any] | None) -> Mapping[str, Trace | None] | None:
        from .estimate import meta_models, step_time  # which import torch

        if self.opened.kind != "cpu" or not step_time.knows(self.opened.machine):
            return None
        traced: Mapping[str, Trace | None] | None = (trace or meta_models.trace_if_sound)(self.original)
        return traced

    def _speed(self, plan: Plan, known: Measured) -> float | None:
        from .estimate import step_time

        if self.traced is not None:
            return step_time.step(plan, self.traced, self.opened.machine)
        return known.card if self.opened.kind in ("cuda", "rocm") else None


def _way(plan: Plan) -> Candidate:
    return Candidate(schemes={}, plan=plan, noise=0.0, worst=None, verdicts={})


def _group(scheme: Scheme) -> str:
    if not scheme.on_the_fly:
        return "files"
    return next(row.name for row in GROUPS if row.least is not None and scheme.bits >= row.least)


def _praised(rows: Iterable[SchemeRow]) -> list[SchemeRow]:
    """Return the rows with their praise; of those that fit, if any does."""
    rows = list(rows)
    free = [row for row in rows if row.grade is not None and not row.refused]
    free = [row for row in free if row.fit != "no"] or free
    praise: dict[str, list[str]] = {}
    for one in PRAISE:
        good = [
            (VERDICTS.index(row.verdict), value, row.scheme)
            for row in free
            if row.grade is not None and row.grade.stars >= one.stars and (value := one.key(row)) is not None
        ]
        if good:
            praise.setdefault(min(good)[2], []).append(one.text)
    return [dataclasses.replace(row, praise=tuple(praise.get(row.scheme, ()))) for row in rows]

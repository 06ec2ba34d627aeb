"""Keeps tables of schemes: a model is opened and traced once, and a table that is asked for again is there."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..compat import hardware
from ..core import NO_OFFLOAD
from ..errors import SdquantError
from ..planning import ROLES, Settings, open_model, scheme_table

if TYPE_CHECKING:
    from ..planning import Opened, Plan, SchemeTable
    from .plan_preview import Target
    from .step_traces import StepTraces

T = TypeVar("T")

_KEPT = 16
_OPENED = 2  # models whose plans are kept: tens of thousands of rows each
# Settings that no plan of an opened model depends on.
_PLAIN: dict[str, Any] = dict.fromkeys((*(f"quant.{row.name}" for row in ROLES), "budget", "size", "quality")) | {
    "offload": NO_OFFLOAD
}
_ROUGH = 1 << 26  # bytes: a table is made again if as many more or fewer are free


@dataclass(frozen=True, kw_only=True)
class TableSoFar:
    """A table. `awaited`: the trace that its speeds wait for; None if it is finished."""

    table: SchemeTable
    awaited: object | None

    @property
    def unfinished(self) -> bool:
        """Return whether its speeds are still being computed."""
        return self.awaited is not None


class SchemeTables:
    """The tables that pages have asked for last."""

    def __init__(self, traces: StepTraces) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[Any, TableSoFar] = OrderedDict()
        self._opened: OrderedDict[Any, Opened] = OrderedDict()
        self._traces = traces

    def table(
        self, target: Target, values: Mapping[str, Any], roles: Sequence[str], *, held: int, stamp: object
    ) -> TableSoFar:
        """Return the table of a model with other settings as they are; at first without speeds, which take seconds.

        Args:
            held: bytes of the model in memory. stamp: changes when the model's files do.

        Raises:
            SdquantError: the model cannot be loaded.
        """
        here = hardware.probe()
        settings = _settings(values)
        free = tuple((one.memory_free or 0) // _ROUGH for one in here.devices)
        key = (target, settings, tuple(roles), free, held // _ROUGH, stamp)
        known = self._found(self._tables, key)
        if known is not None and (known.awaited is None or not self._traces.is_there(known.awaited)):
            return known
        awaited = None

        def trace(plan: Plan) -> Any:
            nonlocal awaited
            named = (target, stamp, plan.dtype)
            traced = self._traces.find(named, plan)
            awaited = named if traced is None else None
            return traced

        opened = self.open(target, settings, stamp)
        table = scheme_table(target.path, settings, here, roles=roles, held=held, trace=trace, opened=opened)
        return self._kept(self._tables, key, TableSoFar(table=table, awaited=awaited), _KEPT)

    def open(self, target: Target, settings: Settings, stamp: object) -> Opened:
        """Return a model whose plans are kept. They depend on neither its schemes nor offload and memory.

        Raises:
            SdquantError: the model cannot be loaded.
        """
        here = hardware.probe()
        key = (target, settings.but(_PLAIN), stamp)
        opened = self._found(self._opened, key)
        if opened is None:
            opened = open_model(target.path, key[1], here, target.companions | {"progress": False})
            opened = self._kept(self._opened, key, replace(opened, plans={}), _OPENED)
        return replace(opened, machine=here)

    def _found(self, shelf: OrderedDict[Any, T], key: Any) -> T | None:
        with self._lock:
            if key in shelf:
                shelf.move_to_end(key)
            return shelf.get(key)

    def _kept(self, shelf: OrderedDict[Any, T], key: Any, value: T, most: int) -> T:
        with self._lock:
            shelf[key] = value
            shelf.move_to_end(key)
            while len(shelf) > most:
                shelf.popitem(last=False)
        return value


def _settings(values: Mapping[str, Any]) -> Settings:
    """Return the settings besides schemes; the defaults if they contradict each other."""
    others = {name: value for name, value in values.items() if name not in {f"quant.{row.name}" for row in ROLES}}
    try:
        return Settings(others)
    except SdquantError:
        return Settings()

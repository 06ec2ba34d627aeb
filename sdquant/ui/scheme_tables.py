"""Keeps tables of schemes: a model is traced once, and a table that is asked for again is there."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..compat import hardware
from ..errors import SdquantError
from ..planning import ROLES, Settings, meta_models, scheme_table

if TYPE_CHECKING:
    from ..planning import Plan, SchemeTable
    from .plan_preview import Target

_KEPT = 16
_ROUGH = 1 << 26  # bytes: a table is made again if as many more or fewer are free


class SchemeTables:
    """The tables that pages have asked for last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[Any, SchemeTable] = OrderedDict()
        self._traces: OrderedDict[Any, Any] = OrderedDict()

    def table(
        self, target: Target, values: Mapping[str, Any], roles: Sequence[str], *, held: int, stamp: object
    ) -> SchemeTable:
        """Return the table of a model with other settings as they are.

        Args:
            held: bytes of the model in memory. stamp: changes when the model's files do.

        Raises:
            SdquantError: the model cannot be loaded.
        """
        here = hardware.probe()
        settings = _settings(values)
        free = tuple((one.memory_free or 0) // _ROUGH for one in here.devices)
        key = (target, settings, tuple(roles), free, held // _ROUGH, stamp)

        def trace(plan: Plan) -> Any:
            return self._kept(self._traces, (target, stamp, plan.dtype), lambda: meta_models.trace_if_sound(plan))

        table: SchemeTable = self._kept(
            self._tables,
            key,
            lambda: scheme_table(
                target.path,
                settings,
                here,
                roles=roles,
                held=held,
                trace=trace,
                progress=False,
                **target.companions,
            ),
        )
        return table

    def _kept(self, shelf: OrderedDict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key in shelf:
                shelf.move_to_end(key)
                return shelf[key]
        value = make()
        with self._lock:
            shelf[key] = value
            while len(shelf) > _KEPT:
                shelf.popitem(last=False)
        return value


def _settings(values: Mapping[str, Any]) -> Settings:
    """Return the settings besides schemes; the defaults if they contradict each other."""
    others = {name: value for name, value in values.items() if name not in {f"quant.{row.name}" for row in ROLES}}
    try:
        return Settings(others)
    except SdquantError:
        return Settings()

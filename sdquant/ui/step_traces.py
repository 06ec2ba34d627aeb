"""Traces of a step, by which the table of schemes foresees speeds: made in the background, kept beside the settings.

To trace a model of full size takes seconds of Python. The table does not wait for it: it asks here, again and again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..planning import meta_models

if TYPE_CHECKING:
    from pathlib import Path

    from ..models import Trace
    from ..planning import Plan

log = logging.getLogger(__name__)

Traces = Mapping[str, "Trace | None"]

_KEPT = 16
_WAITING = 2  # models: the last ones that somebody has looked at
_QUIET = 0.3  # seconds in which nobody's question was answered, before a trace begins
_PATIENCE = 20.0  # seconds that it waits for them


class StepTraces:
    """Finds traces: in memory, in files, or by a thread that makes them when the page has nothing else to do."""

    def __init__(self, folder: Path, make: Callable[[Plan], Traces] = meta_models.trace_if_sound) -> None:
        self._folder, self._make = folder, make
        self._change = threading.Condition()
        self._known: OrderedDict[object, Traces] = OrderedDict()
        self._wanted: OrderedDict[object, Plan] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._answering, self._answered = 0, 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let no trace begin in this block, nor soon after it: somebody waits for an answer."""
        with self._change:
            self._answering += 1
        try:
            yield
        finally:
            with self._change:
                self._answering, self._answered = self._answering - 1, time.monotonic()
                self._change.notify_all()

    def is_there(self, key: object) -> bool:
        """Return whether a trace that was asked for is known by now."""
        with self._change:
            return key in self._known

    def find(self, key: object, plan: Plan) -> Traces | None:
        """Return the trace of a plan, or None while it is being made.

        Args:
            key: what the trace depends on: the model, its files, and the dtype.
        """
        from .trace_files import read_trace

        with self._change:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            if key in self._wanted:
                return None
        stored = read_trace(self._folder, key)
        with self._change:
            if stored is not None:
                self._keep(key, stored)
                return stored
            self._wanted[key] = plan
            while len(self._wanted) > _WAITING:
                self._wanted.popitem(last=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sdquant-traces", daemon=True)
                self._thread.start()
        return None

    def _run(self) -> None:
        """Make what is wanted, the newest first; end when there is nothing."""
        from .trace_files import write_trace

        while True:
            with self._change:
                self._wait_for_quiet()
                if not self._wanted:
                    self._thread = None
                    return
                key, plan = next(reversed(self._wanted.items()))
            traces = self._made(plan)
            with self._change:
                self._wanted.pop(key, None)
                self._keep(key, traces)
            write_trace(self._folder, key, traces)

    def _wait_for_quiet(self) -> None:
        until = time.monotonic() + _PATIENCE
        while (now := time.monotonic()) < until:
            quiet = self._answered + _QUIET - now
            if not self._answering and quiet <= 0:
                return
            self._change.wait(min(until - now, quiet if quiet > 0 and not self._answering else _PATIENCE))

    def _made(self, plan: Plan) -> Traces:
        try:
            return self._make(plan)
        except Exception as error:  # of a model that nobody has tried; without times there is a table, too
            log.info("a step cannot be traced: %s: %s", type(error).__name__, error)
            return {}

    def _keep(self, key: object, traces: Traces) -> None:
        self._known[key] = traces
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

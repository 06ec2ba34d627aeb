"""Running a component that is larger than its budget: some blocks stay, the others take turns in what is left of it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from ..utils.buffers import flat_buffer
from .async_copy import Ticket, transfer
from .streaming_plan import least, plan
from .suballocator import Arena

if TYPE_CHECKING:
    from torch import Tensor

    from .blocks import Component, Unit
    from .residency import Residency


class Streamer:
    """The memory for the streamed blocks of one component, and where in it they are.

    The order of blocks is learned while they run: each one is expected to be followed by what followed it last time.
    As many are on their way as there is room for: from the moment the component is called, while a block runs, and
    after the last one, when the first of the next step is fetched. So the reader rests only when there is no room.
    """

    def __init__(self, component: Component, budget: int, residency: Residency) -> None:
        """`budget`: as for `plan`."""
        self._component, self._budget, self._residency = component, budget, residency
        self._make_plan()
        self._counters = residency.counters
        self._transfer = transfer(residency.device)
        self._arena: Arena | None = None
        self._in: dict[str, tuple[Tensor, int]] = {}  # of each block on the device: its part, and bytes beyond it
        self._coming: deque[tuple[Unit, Ticket, Tensor]] = deque()  # in the order in which they are expected
        self._method = ""
        self._first: Unit | None = None
        self._last: Unit | None = None
        self._held = 0
        self._nothing = torch.empty(0, dtype=torch.uint8, device=residency.device)

    def _make_plan(self) -> None:
        self.plan = made = plan(self._component, self._budget)
        self._sizes = [unit.nbytes for unit in self._component.units]
        self._next = dict(zip(made.streamed, (*made.streamed[1:], *made.streamed[:1]), strict=True))
        self._after: dict[str, dict[Unit, Unit]] = {}  # by method, what was seen to follow what
        self._start: dict[str, Unit] = {}  # by method, the first one seen

    def renew(self) -> None:
        """Before a call: plan again if units have another size than before, since their library has repacked them at
        a first forward. Where they no longer fit the budget the plan stays, and what outgrew its room is read into
        memory of its own."""
        if self._sizes == [unit.nbytes for unit in self._component.units] or least(self._component) > self._budget:
            return
        self.release()
        self._make_plan()
        self._residency.evict(self.plan.streamed)

    @property
    def missing(self) -> int:
        """Bytes that `begin` will take."""
        return 0 if self._held else self.plan.buffers * self.plan.buffer_bytes

    def begin(self, method: str) -> None:
        """A method of the component starts."""
        self._method, self._first, self._last = method, None, None
        if self._arena is None:
            self._held = self.missing
            self._counters.hold(self._held)
            self._arena = Arena(flat_buffer(self._held, self._residency.device), self.plan.buffer_bytes)
        self._fetch_ahead()  # what is outside blocks may compute before the first one

    def end(self) -> None:
        """It is over; the next call is expected to start as this one did."""
        if self._last is not None and self._first is not None:
            self._after.setdefault(self._method, {})[self._last] = self._first
            self._start[self._method] = self._first

    def enter(self, unit: Unit) -> None:
        """A streamed block is about to run: within a call of the component, or by itself (whoever calls it; in backward
        `recompute` has brought it), which says nothing about the order of the next call."""
        if unit.resident:
            return
        if not self._component.depth:
            part = self._take(unit)
            self._arrive(unit, self._transfer.start(unit, part), part)
            return
        if self._coming and self._coming[0][0] is unit:
            _, ticket, part = self._coming.popleft()
            self._counters.prefetched += 1
            self._counters.waited += not ticket.done()
            self._arrive(unit, ticket, part)
        else:
            self._discard()
            part = self._take(unit)
            self._arrive(unit, self._transfer.start(unit, part), part)
        if self._last is not None:
            self._after.setdefault(self._method, {})[self._last] = unit
        self._first = self._first or unit
        self._last = unit
        self._fetch_ahead()

    def leave(self, unit: Unit) -> None:
        """It has run."""
        if unit.name in self._in:
            unit.drop(self._residency.store)
            part, beyond = self._in.pop(unit.name)
            self._give(part)
            self._counters.hold(-beyond)
            if self._component.depth:
                self._fetch_ahead()

    def release(self) -> None:
        """Give the memory up."""
        self._discard(expected=True)
        self._arena = None
        self._counters.hold(-self._held)
        self._held = 0

    def close(self) -> None:
        """Give everything up, the thread too."""
        self.release()
        self._transfer.close()

    def _take(self, unit: Unit) -> Tensor:
        """Room for a block that is wanted now: none of the arena if it outgrew that (its library repacked it), or if
        the arena is given up."""
        part = None if self._arena is None else self._arena.take(unit.nbytes)
        return self._nothing if part is None else part

    def _give(self, part: Tensor) -> None:
        if part.numel() and self._arena is not None:
            self._arena.give(part)

    def _arrive(self, unit: Unit, ticket: Ticket, part: Tensor) -> None:
        try:
            flat = ticket.wait()
        except BaseException:
            self._give(part)
            raise
        unit.place(flat, held=False)
        beyond = 0 if flat.data_ptr() == part.data_ptr() else flat.numel()
        self._in[unit.name] = part, beyond
        self._counters.hold(beyond)

    def _fetch_ahead(self) -> None:
        """Start reading what is expected next while there is room for it; on a mere guess, one block alone."""
        if not self.plan.streamed:  # blocks have shrunk, and all fit now
            return
        while self._arena is not None and (not self._coming or self._method in self._start):
            unit = self._expected()
            if unit.resident or any(unit is coming for coming, _, _ in self._coming):
                return
            part = self._arena.take(unit.nbytes)
            if part is None:
                return
            self._coming.append((unit, self._transfer.start(unit, part), part))

    def _expected(self) -> Unit:
        """The block that will be called after those that are on their way."""
        last = self._coming[-1][0] if self._coming else self._last
        if last is None:
            return self._start.get(self._method, self.plan.streamed[0])
        return self._after.get(self._method, {}).get(last, self._next[last])

    def _discard(self, expected: bool = False) -> None:
        """Take the room of blocks back that were fetched ahead in vain, when nothing writes to it any more.

        Args:
            expected: whether they are not wrong, only no longer wanted.
        """
        while self._coming:
            _, ticket, part = self._coming.popleft()
            self._counters.mispredicted += not expected
            ticket.abandon()
            self._give(part)

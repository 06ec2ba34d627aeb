"""Stream the blocks of a component larger than its budget: some stay, the others take turns in the remaining memory."""

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
    """Prefetcher and buffers for the streamed blocks of one component.

    The order of blocks is learned while they run: each is expected to be followed by the block that followed it last
    time. As many blocks are prefetched as there is memory for: as soon as the component is called, while a block runs,
    and after the last one, when the first of the next step is fetched. So reading pauses only when memory is full.
    """

    def __init__(self, component: Component, budget: int, residency: Residency) -> None:
        """Set up the plan. `budget`: bytes, as for `plan`."""
        self._component, self._budget, self._residency = component, budget, residency
        self._make_plan()
        self._counters = residency.counters
        self._transfer = transfer(residency.device)
        self._arena: Arena | None = None
        self._in: dict[str, tuple[Tensor, int]] = {}  # by block on the device: its part, and bytes outside the arena
        self._coming: deque[tuple[Unit, Ticket, Tensor]] = deque()  # in the order in which they are expected
        self._method = ""
        self._first: Unit | None = None
        self._last: Unit | None = None
        self._held = 0
        self._nothing = torch.empty(0, dtype=torch.uint8, device=residency.device)

    def _make_plan(self) -> None:
        self.plan = stream_plan = plan(self._component, self._budget)
        self._sizes = [unit.nbytes for unit in self._component.units]
        self._next = dict(
            zip(stream_plan.streamed, (*stream_plan.streamed[1:], *stream_plan.streamed[:1]), strict=True)
        )
        self._after: dict[str, dict[Unit, Unit]] = {}  # by method: block -> the block that followed it
        self._start: dict[str, Unit] = {}  # by method: the first block

    def renew(self) -> None:
        """Before a call, plan again if the sizes of units have changed, as when a library repacks weights at the first
        forward. If they no longer fit the budget the plan stays, and blocks that outgrew the arena are read into memory
        of their own."""
        if self._sizes == [unit.nbytes for unit in self._component.units] or least(self._component) > self._budget:
            return
        self.release()
        self._make_plan()
        self._residency.evict(self.plan.streamed)

    @property
    def missing(self) -> int:
        """Return the bytes that `begin` will allocate."""
        return 0 if self._held else self.plan.buffers * self.plan.buffer_bytes

    def begin(self, method: str) -> None:
        """Start a method of the component: allocate the arena and prefetch."""
        self._method, self._first, self._last = method, None, None
        if self._arena is None:
            self._held = self.missing
            self._counters.hold(self._held)
            self._arena = Arena(flat_buffer(self._held, self._residency.device), self.plan.buffer_bytes)
        self._fetch_ahead()  # the layers outside blocks may run before the first one

    def end(self) -> None:
        """End a method; the next call is expected to start with the same block."""
        if self._last is not None and self._first is not None:
            self._after.setdefault(self._method, {})[self._last] = self._first
            self._start[self._method] = self._first

    def enter(self, unit: Unit) -> None:
        """Have a streamed block on the device before it runs. A block that runs outside a call of the component (other
        than in backward, where `recompute` has fetched it) does not affect the learned order."""
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
        """Evict a streamed block after it has run."""
        if unit.name in self._in:
            unit.drop(self._residency.store)
            part, beyond = self._in.pop(unit.name)
            self._give(part)
            self._counters.hold(-beyond)
            if self._component.depth:
                self._fetch_ahead()

    def release(self) -> None:
        """Free the arena."""
        self._discard(expected=True)
        self._arena = None
        self._counters.hold(-self._held)
        self._held = 0

    def close(self) -> None:
        """Free the arena and stop the prefetching thread."""
        self.release()
        self._transfer.close()

    def _take(self, unit: Unit) -> Tensor:
        """Take memory of the arena for a block needed now; an empty tensor if the block outgrew it (its library
        repacked it), or if the arena is freed."""
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
        """Prefetch the expected blocks while there is memory; only one block before the order is known."""
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
        """Return the block that is expected after those being prefetched."""
        last = self._coming[-1][0] if self._coming else self._last
        if last is None:
            return self._start.get(self._method, self.plan.streamed[0])
        return self._after.get(self._method, {}).get(last, self._next[last])

    def _discard(self, expected: bool = False) -> None:
        """Free the memory of blocks that were prefetched in vain, once nothing writes to it any more.

        Args:
            expected: whether they are merely no longer needed, and not mispredicted.
        """
        while self._coming:
            _, ticket, part = self._coming.popleft()
            self._counters.mispredicted += not expected
            ticket.abandon()
            self._give(part)

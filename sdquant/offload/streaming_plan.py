"""Plan which blocks of a component stay on the device within a budget, and the buffers for the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .suballocator import Places

if TYPE_CHECKING:
    from .blocks import Component, Unit

# Maximum predicted step time of a plan (`foreseen`), relative to the larger of computing and reading. Measured steps
# took up to 0.07 more (bench/offload.py), and 1.15 is the goal.
GOOD = 1.08
# Ratios of reading to computing time for which plans are simulated. At other ratios one hides the other.
_BALANCES = (0.7, 0.85, 1.0, 1.2, 1.4)
_SLOTS = (2, 3, 4, 5, 6)
_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """A division of a component into resident and streamed blocks.

    Attributes:
        resident: units that stay.
        streamed: blocks that are fetched for each run and evicted after it.
        buffers: number of the largest of these that fit on the device at the same time: two or more if there is memory
            to prefetch one. Smaller blocks share a buffer.
        buffer_bytes: bytes of each buffer.
    """

    resident: tuple[Unit, ...]
    streamed: tuple[Unit, ...]
    buffers: int
    buffer_bytes: int

    @property
    def nbytes(self) -> int:
        """Return the maximum bytes on the device."""
        return sum(unit.nbytes for unit in self.resident) + self.buffers * self.buffer_bytes

    @property
    def read(self) -> int:
        """Return the bytes that each step reads."""
        return sum(unit.nbytes for unit in self.streamed)


def least(component: Component) -> int:
    """Return the smallest budget that the component runs with: the layers outside blocks and the largest block."""
    return component.rest.nbytes + max((unit.nbytes for unit in component.blocks), default=0)


def plan(component: Component, budget: int) -> StreamPlan:
    """Return a plan with buffers for two of the largest block, and resident blocks in the remaining memory; or, if
    blocks differ in size, one that reads no more and waits less: the one that reads least of those within `GOOD`, else
    the one that waits least.

    `budget` must be at least `least(component)`. The computing time of a block is assumed proportional to its bytes.
    """
    if component.nbytes <= budget:
        return StreamPlan(resident=tuple(component.units), streamed=(), buffers=0, buffer_bytes=0)
    first, *others = _candidates(component, budget)
    candidates = [first, *(candidate for candidate in others if candidate.read <= first.read)]
    if len(candidates) == 1:
        return first
    waits = [max(foreseen(component, candidate, balance) for balance in _BALANCES) for candidate in candidates]
    good = [(candidate.read, wait) for candidate, wait in zip(candidates, waits, strict=True) if wait <= GOOD]
    if good:
        return next(
            candidate for candidate, wait in zip(candidates, waits, strict=True) if (candidate.read, wait) == min(good)
        )
    return candidates[waits.index(min(waits))]


def foreseen(component: Component, plan: StreamPlan, balance: float) -> float:
    """Return the predicted time of a step, relative to the larger of computing and reading.

    Args:
        balance: ratio of reading time to computing time.
    """
    streamed = {unit.name for unit in plan.streamed}
    blocks = [(unit.nbytes, unit.name in streamed) for unit in component.blocks]
    compute = sum(nbytes for nbytes, _ in blocks)
    if not streamed or not compute:
        return 1.0
    places = Places(plan.buffers, plan.buffer_bytes)
    waiting: deque[tuple[float, int]] = deque()  # when parts come back, and which
    slowness = balance * compute / plan.read
    now = read = 0.0
    ends = []
    for _ in range(_STEPS):
        for nbytes, comes in blocks:
            if comes:
                while waiting and waiting[0][0] <= read:
                    places.give(waiting.popleft()[1])
                while (begin := places.take(nbytes)) is None:
                    back, part = waiting.popleft()
                    places.give(part)
                    read = max(read, back)
                read += nbytes * slowness
                now = max(now, read)
                waiting.append((now + nbytes, begin))
            now += nbytes
        ends.append(now)
    return (ends[-1] - ends[1]) / (len(ends) - 2) / (compute * max(1.0, balance))


def _candidates(component: Component, budget: int) -> Iterator[StreamPlan]:
    """Yield plans in which all blocks above some size stay, and others as far as memory allows besides some buffers:
    spread evenly, or the last ones, during which the first ones of the next step are prefetched. The first plan keeps
    no block for its size."""
    room = budget - component.rest.nbytes
    largest = max(unit.nbytes for unit in component.blocks)
    if 2 * largest > room:
        yield _spread(component, largest, 1, room - largest)
    for size in sorted({unit.nbytes for unit in component.blocks}, reverse=True):
        above = sum(unit.nbytes for unit in component.blocks if unit.nbytes > size)
        for slots in _SLOTS:
            if above + slots * size <= room:
                left = room - above - slots * size
                yield _spread(component, size, slots, left)
                yield _spread(component, size, slots, left, last=True)


def _spread(component: Component, size: int, slots: int, room: int, last: bool = False) -> StreamPlan:
    """Return the plan in which blocks above `size` stay, and of the others as many as fit in `room` bytes: the last
    ones, or spread evenly, so that there is time to fetch the next one between two streamed ones."""
    blocks = [unit for unit in component.blocks if unit.nbytes <= size][:: -1 if last else 1]
    share = room / max(sum(unit.nbytes for unit in blocks), 1)
    resident = {unit.name for unit in component.blocks if unit.nbytes > size}
    taken = passed = 0
    for unit in blocks:
        passed += unit.nbytes
        if not last and taken + unit.nbytes <= min(room, share * passed):
            resident.add(unit.name)
            taken += unit.nbytes
    for unit in blocks:  # what is left over by rounding
        if unit.name not in resident and taken + unit.nbytes <= room:
            resident.add(unit.name)
            taken += unit.nbytes
    streamed = tuple(unit for unit in component.blocks if unit.name not in resident)
    return StreamPlan(
        resident=(component.rest, *(unit for unit in component.blocks if unit.name in resident)),
        streamed=streamed,
        buffers=min(slots, len(streamed)),
        buffer_bytes=max((unit.nbytes for unit in streamed), default=0),
    )

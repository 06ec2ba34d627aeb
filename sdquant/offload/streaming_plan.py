"""Plan which blocks of a component stay on the device within a budget, and the buffers for the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .suballocator import Places

if TYPE_CHECKING:
    from .blocks import Component, Unit

# Maximum predicted step time of a plan (`foreseen`), relative to the larger of computing and reading; and of one that
# is taken because others have to wait longer.
GOOD, BAD = 1.05, 1.15
# What a plan may read, relative to the one that reads least, if that is more than with two buffers for the largest.
_READ = 1.1
# Ratios of reading to computing time for which plans are simulated, the hardest first. At others one hides the other.
_BALANCES = (1.0, 0.85, 1.15, 0.7, 1.3, 0.55, 1.6)
# Computing times by size, of blocks by turns: as none knows them, a plan should do for those of some as well.
_EVEN, _UNEVEN = (1.0, 1.0), ((0.5, 1.5), (1.5, 0.5))
_SLOTS = (2, 3, 4, 5, 6)
_SHARED = (1.5, 2.0, 2.5)  # largest blocks that a buffer for several holds
_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """A division of a component into resident and streamed blocks.

    Attributes:
        resident: units that stay.
        streamed: blocks that are fetched for each run and evicted after it.
        buffers: number of the largest of these that fit on the device at the same time: two or more if there is memory
            to prefetch one. Smaller blocks share a buffer. One that is larger than a block is for several.
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
    """Return the plan that reads least of those within `GOOD` and `_READ`, whatever the ratio of reading to computing;
    else the one that waits least; where blocks have to wait for long in all, the one with the shortest steps.

    `budget` must be at least `least(component)`. The computing time of a block is assumed proportional to its bytes;
    among plans that are good then, one that also is where every other block takes three times as long comes first.
    """
    if component.nbytes <= budget:
        return StreamPlan(resident=tuple(component.units), streamed=(), buffers=0, buffer_bytes=0)
    candidates = list(_candidates(component, budget))
    if len(candidates) == 1:
        return candidates[0]
    least_read = min(candidate.read for candidate in candidates)
    most_read = max(candidates[0].read, _READ * least_read)
    near = sorted((one for one in candidates if one.read <= most_read), key=lambda one: one.read)
    good = [one for one in near if all(foreseen(component, one, at) <= GOOD for at in _BALANCES)]
    for one in good:
        if all(foreseen(component, one, at, times=by) <= GOOD for at in _BALANCES for by in _UNEVEN):
            return one
    if good:
        return good[0]
    times = [max(foreseen(component, one, at) for at in _BALANCES) for one in near]
    if min(times) <= BAD:
        return near[times.index(min(times))]
    return min(candidates, key=lambda one: max(foreseen(component, one, at, least_read) for at in _BALANCES))


def foreseen(
    component: Component,
    plan: StreamPlan,
    balance: float,
    read: int | None = None,
    times: tuple[float, float] = _EVEN,
) -> float:
    """Return the predicted time of a step, relative to the larger of computing and reading.

    Args:
        balance: ratio of reading time to computing time.
        read: the bytes whose reading counts; None for those that the plan reads.
        times: what computing a byte takes, of blocks by turns.
    """
    streamed = {unit.name for unit in plan.streamed}
    blocks = [
        (unit.nbytes, unit.name in streamed, unit.nbytes * times[i % 2]) for i, unit in enumerate(component.blocks)
    ]
    compute = sum(seconds for _, _, seconds in blocks)
    if not streamed or not compute:
        return 1.0
    places = Places(plan.buffers, plan.buffer_bytes)
    waiting: deque[tuple[float, int]] = deque()  # when parts come back, and which
    slowness = balance * compute / (read or plan.read)
    now = done = 0.0
    ends = []
    for _ in range(_STEPS):
        for nbytes, comes, seconds in blocks:
            if comes:
                while waiting and waiting[0][0] <= done:
                    places.give(waiting.popleft()[1])
                while (begin := places.take(nbytes)) is None:
                    back, part = waiting.popleft()
                    places.give(part)
                    done = max(done, back)
                done += nbytes * slowness
                now = max(now, done)
                waiting.append((now + seconds, begin))
            now += seconds
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
        yield _spread(component, largest, 1, 0, shared=room)
    for size in sorted({unit.nbytes for unit in component.blocks}, reverse=True):
        above = sum(unit.nbytes for unit in component.blocks if unit.nbytes > size)
        for slots in _SLOTS:
            if above + slots * size <= room:
                left = room - above - slots * size
                yield _spread(component, size, slots, left)
                yield _spread(component, size, slots, left, last=True)
        for share in _SHARED:
            shared = int(share * size)
            if above + shared <= room:
                yield _spread(component, size, 1, room - above - shared, shared=shared)


def _spread(component: Component, size: int, slots: int, room: int, last: bool = False, shared: int = 0) -> StreamPlan:
    """Return the plan in which blocks above `size` stay, and of the others as many as fit in `room` bytes: the last
    ones, or spread evenly, so that there is time to fetch the next one between two streamed ones.

    Args:
        shared: bytes of the only buffer, for more than one block.
    """
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
        buffer_bytes=shared or max((unit.nbytes for unit in streamed), default=0),
    )

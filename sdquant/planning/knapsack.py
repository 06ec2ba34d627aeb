"""Choose one option for each of many items, of least noise within a size or of least size within a noise.

Greedy on the lower convex hull of each item's options, which is the optimum of the Lagrangian, then filled up with
whatever still fits. If much is left all the same, of few or very different items, one item pays for another that is too
large. Deterministic: ties go to the item that comes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Cost:
    """One way to store an item."""

    bytes: int
    noise: float


Options = Sequence[Cost]
_Payer = tuple[float, int, int, int]  # the noise that it adds, the item, its option, and minus the bytes that it frees
_MUCH = 200  # what is left is much if it is more than this part of the limit


def fewest_bytes(items: Sequence[Options]) -> int:
    """Return the fewest bytes that all items take."""
    return sum(min(option.bytes for option in options) for options in items)


def within_bytes(items: Sequence[Options], limit: int) -> list[int]:
    """Return the index of an option of each item, of at most `limit` bytes together, if all can be so small."""
    hulls = [hull(options) for options in items]
    picks = [rows[0] for rows in hulls]
    left = limit - sum(items[i][one].bytes for i, one in enumerate(picks))
    for i, one in _steps(items, hulls):
        more = items[i][one].bytes - items[i][picks[i]].bytes
        if more <= left:
            picks[i], left = one, left - more
    left = _fill(items, picks, left)
    for _ in items:
        if left * _MUCH <= limit or (rest := _trade(items, picks, left)) is None:
            break
        left = _fill(items, picks, rest)
    return picks


def within_noise(items: Sequence[Options], limit: float) -> list[int]:
    """Return the index of an option of each item, at most `limit` of noise together, or the least there is."""
    hulls = [hull(options) for options in items]
    picks = [rows[0] for rows in hulls]
    total = sum(items[i][one].noise for i, one in enumerate(picks))
    for i, one in _steps(items, hulls):
        if total <= limit:
            break
        total += items[i][one].noise - items[i][picks[i]].noise
        picks[i] = one
    for i in sorted(range(len(items)), key=lambda i: (-items[i][picks[i]].bytes, i)):  # what was more than needed
        slack = limit - sum(items[k][one].noise for k, one in enumerate(picks))
        now = items[i][picks[i]]
        cheaper = [k for k, o in enumerate(items[i]) if o.bytes < now.bytes and o.noise - now.noise <= slack]
        if cheaper:
            picks[i] = min(cheaper, key=lambda k: (items[i][k].bytes, items[i][k].noise, k))
    return picks


def sweep(items: Sequence[Options]) -> list[Cost]:
    """Return bytes and noise of all items together, from the fewest bytes on, after each step that saves most noise by
    byte: the lower convex hull of what can be chosen."""
    hulls = [hull(options) for options in items]
    picks = [rows[0] for rows in hulls]
    costs = [options[one] for options, one in zip(items, picks, strict=True)]
    rows = [Cost(sum(one.bytes for one in costs), sum(one.noise for one in costs))]
    for i, one in _steps(items, hulls):
        old, new = items[i][picks[i]], items[i][one]
        rows.append(Cost(rows[-1].bytes + new.bytes - old.bytes, max(0.0, rows[-1].noise + new.noise - old.noise)))
        picks[i] = one
    # What differences leave of rounding is no noise.
    return [*rows[:-1], Cost(rows[-1].bytes, sum(items[i][one].noise for i, one in enumerate(picks)))]


def hull(options: Options) -> list[int]:
    """Return the options on the lower convex hull of noise over bytes, by bytes."""
    rows: list[int] = []
    for k in sorted(range(len(options)), key=lambda k: (options[k].bytes, options[k].noise, k)):
        if rows and options[k].noise >= options[rows[-1]].noise:
            continue
        while len(rows) > 1 and _slope(options, rows[-2], rows[-1]) >= _slope(options, rows[-1], k):
            rows.pop()
        rows.append(k)
    return rows


def _slope(options: Options, one: int, other: int) -> float:
    """Return the change of noise by byte, at most 0."""
    return (options[other].noise - options[one].noise) / max(1, options[other].bytes - options[one].bytes)


def _steps(items: Sequence[Options], hulls: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return item and option of all steps along the hulls, those that save most noise by byte first."""
    steps = [
        (_slope(items[i], one, other), i, place, other)
        for i, rows in enumerate(hulls)
        for place, (one, other) in enumerate(pairwise(rows))
    ]
    return [(i, other) for _, i, _, other in sorted(steps)]


def _fill(items: Sequence[Options], picks: list[int], left: int) -> int:
    """Take better options, on a hull or not, while they fit: those first that save most. Return what is left then."""
    queue = [(-_gain(items[i], picks[i], k), i, k) for i, options in enumerate(items) for k in range(len(options))]
    queue = [row for row in queue if row[0] < 0]
    heapq.heapify(queue)
    while queue:
        gain, i, k = heapq.heappop(queue)
        now = _gain(items[i], picks[i], k)
        more = items[i][k].bytes - items[i][picks[i]].bytes
        if now <= 0 or more > left:
            continue
        if -gain != now:  # the item has changed since
            heapq.heappush(queue, (-now, i, k))
            continue
        picks[i], left = k, left - more
    return left


def _trade(items: Sequence[Options], picks: list[int], left: int) -> int | None:
    """Take the better option of one item and a smaller one of another that save most noise together, and return what is
    left then; None if no two save any."""
    changes = [
        (option.bytes - items[i][picks[i]].bytes, _gain(options, picks[i], k), i, k)
        for i, options in enumerate(items)
        for k, option in enumerate(options)
    ]
    payers = sorted((row for row in changes if row[0] < 0), key=lambda row: row[0])
    best, trade = 0.0, None
    cheapest: list[_Payer] = []  # of those that free enough, the best of two items
    at = 0
    for more, gain, i, k in sorted((row for row in changes if row[0] > left and row[1] > 0), key=lambda row: -row[0]):
        while at < len(payers) and -payers[at][0] >= more - left:
            freed, loss, j, smaller = payers[at]
            cheapest = _with(cheapest, (-loss, j, smaller, freed))
            at += 1
        other = next((row for row in cheapest if row[1] != i), None)
        if other is not None and gain - other[0] > best:
            best, trade = gain - other[0], (i, k, other[1], other[2], left - more - other[3])
    if trade is None:
        return None
    i, k, j, smaller, rest = trade
    picks[i], picks[j] = k, smaller
    return rest


def _with(rows: list[_Payer], row: _Payer) -> list[_Payer]:
    """Return the best rows of two different items, the better first."""
    one = min([row, *(known for known in rows if known[1] == row[1])])
    return sorted([one, *(known for known in rows if known[1] != row[1])])[:2]


def _gain(options: Options, now: int, other: int) -> float:
    return options[now].noise - options[other].noise

"""The ranker of `auto` and presets: ways to run a model on a device, and the orders in which they are preferred."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from .estimate import meta_models, step_time
from .estimate.scheme_snr import USABLE

if TYPE_CHECKING:
    from ..models import Trace
    from ..offload import OffloadMode
    from .candidates import Candidate, Opened

# The share of the largest component that may be copied in every step before fewer bits are the better choice: a third
# is copied while the rest computes.
STREAMED = 1 / 3


@dataclass(frozen=True)
class Way:
    """A candidate with an offload mode.

    Attributes:
        room: bytes of weights that may be on the device.
        foreseen: predicted step time relative to the unquantized model; None if unknown.
        counted: the same, where times close to the fastest count as equal; 1.0 if unknown.
    """

    candidate: Candidate
    offload: OffloadMode
    room: int
    foreseen: float | None = None
    counted: float = 1.0

    @property
    def bytes(self) -> int:
        """Bytes of all weights."""
        return self.candidate.plan.bytes

    @property
    def streams(self) -> bool:
        """True if not all weights can be on the device at once."""
        return self.bytes > self.room

    @property
    def each_step(self) -> int:
        """Bytes that come to the device with every step."""
        return self.offload.each_step(self.candidate.largest, self.room)

    @property
    def share(self) -> float:
        """Fraction of the largest component that comes to the device with every step."""
        return max(0.0, 1 - self.room / max(self.candidate.largest, 1))

    @property
    def precision(self) -> float:
        """Signal-to-noise ratio of its least precise scheme, in dB."""
        return math.inf if self.candidate.worst is None else self.candidate.worst

    @property
    def usable(self) -> bool:
        """False if so few bits visibly degrade the images."""
        return self.precision >= USABLE

    @property
    def slow(self) -> bool:
        """True if the matrix calls the combination slow."""
        return self.candidate.verdicts[self.offload.name] == "slow"

    @property
    def tier(self) -> int:
        """0 if it runs well, 1 if it streams too much for that, 2 if images suffer."""
        return 2 if not self.usable else int(self.share > STREAMED)


def decoded_bytes(candidate: Candidate) -> int:
    """Return the bytes of the largest quantized weight, decoded."""
    return max((weight.bytes_bf16 for part in candidate.plan.components for weight in part.weights), default=0)


def by_moves(way: Way) -> tuple[Any, ...]:
    """Sort key for speed, by what moves and not by computing time."""
    takes_turns = way.offload.takes_turns or way.streams
    return not way.usable, way.each_step, takes_turns, way.offload.order, way.slow


def fastest_first(ways: Iterable[Way]) -> list[Way]:
    """Return the ways from fastest to slowest: what moves decides, then predicted times, then precision."""
    ordered: list[Way] = []
    for _, group in groupby(sorted(ways, key=by_moves), key=by_moves):
        ordered += sorted(counted(group), key=lambda way: (way.counted, way.candidate.noise))
    return ordered


def counted(ways: Iterable[Way], among: Callable[[Way], bool] = lambda way: True) -> list[Way]:
    """Return the ways with `counted` set; the fastest is that of the ways that `among` accepts."""
    rows = list(ways)
    fastest = min((way.foreseen or 1.0 for way in rows if among(way)), default=1.0)
    return [dataclasses.replace(way, counted=step_time.counted(way.foreseen or 1.0, fastest)) for way in rows]


def step_times(
    opened: Opened, rows: Iterable[Candidate], traced: Mapping[str, Trace | None] | None = None
) -> list[float | None]:
    """Return the predicted step time of each candidate relative to the unquantized model, None where it is unknown.

    Args:
        traced: see `meta_models.trace_if_sound`; None to trace the first candidate here.
    """
    rows = list(rows)
    if traced is None:
        if opened.kind != "cpu" or not step_time.knows(opened.machine):
            return [None] * len(rows)
        traced = meta_models.trace_if_sound(rows[0].plan)
    return [step_time.step(row.plan, traced, opened.machine) for row in rows]


def _precise(way: Way) -> tuple[Any, ...]:
    if way.usable and not way.streams:
        return 0, way.slow, way.candidate.noise, way.bytes
    return 1 + way.tier, way.slow, *_by_scheme(way)


def _best(way: Way) -> tuple[Any, ...]:
    return way.tier, *_by_scheme(way), way.slow


def _fast(way: Way) -> tuple[Any, ...]:
    """Sort key for speed: streaming is slower; among equally fast candidates, the one closest to the unchanged model.

    If step times are unknown, smaller quantized models count as faster.
    """
    if way.streams or way.foreseen is None:
        return not way.usable, way.streams, way.slow, 1.0, bool(way.candidate.schemes) and not way.streams, way.bytes
    return not way.usable, way.streams, way.slow, way.counted, bool(way.candidate.schemes), way.candidate.noise


def _by_scheme(way: Way) -> tuple[Any, ...]:
    """Sort key for precision; with the same scheme, leaving components unquantized must not cause streaming.

    Candidates that stream too much are ranked by size, smallest first.
    """
    if way.tier == 1:
        return (way.bytes,)
    return -way.precision, way.streams, way.bytes if way.streams else way.candidate.noise


# What presets prefer, as a sort key: fitting whole before precision, precision before fitting whole, or speed. All of
# them avoid streaming more than STREAMED.
OBJECTIVES: Mapping[str, Callable[[Way], tuple[Any, ...]]] = {"precise": _precise, "best": _best, "fast": _fast}

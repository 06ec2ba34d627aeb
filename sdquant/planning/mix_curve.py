"""The curve of a mix: what quality so many bytes bring for the model at hand, and what one scheme for all would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..utils.byte_sizes import size
from ..utils.metrics import decibels
from . import knapsack

POINTS = 24  # of the curve, at most


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One way to store the model.

    Attributes:
        label: "mix", or the scheme that all weights get that it fits.
        bytes: of all weights of the pipeline.
        noise: predicted power of the noise in the outputs, relative to them; the sum over components.
    """

    label: str
    bytes: int
    noise: float

    @property
    def db(self) -> float:
        """The signal-to-noise ratio in dB; infinite without noise."""
        return decibels(1.0, self.noise)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; db is null without noise."""
        return {"label": self.label, "bytes": self.bytes, "db": round(self.db, 2) if self.noise > 0 else None}


@dataclass(frozen=True, kw_only=True)
class MixCurve:
    """Predicted quality against bytes.

    Attributes:
        mixes: the fewest bytes first. schemes: one scheme for all weights that it fits; likewise.
        pick: the mix of the plan; None if none was asked for.
        how: what the prediction is made from: "statistics", "weights", or "names", before the weights were read.
    """

    mixes: tuple[CurvePoint, ...]
    schemes: tuple[CurvePoint, ...]
    pick: CurvePoint | None
    how: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "from": self.how,
            "chosen": None if self.pick is None else self.pick.to_dict(),
            "mixes": [point.to_dict() for point in self.mixes],
            "schemes": [point.to_dict() for point in self.schemes],
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """Return name, size and dB of some mixes, the chosen one and all schemes, by size, for a table."""
        noisy = [point for point in self.mixes if point.noise > 0]
        some = [point for point in noisy[:: max(1, len(noisy) // 8)] if point != self.pick]
        points = [(point, point.label) for point in (*some, *self.schemes)]
        points += [(self.pick, "chosen mix")] if self.pick is not None else []
        return [
            (label, size(point.bytes), _words(point)) for point, label in sorted(points, key=lambda row: row[0].bytes)
        ]


def _words(point: CurvePoint) -> str:
    """Return the quality of a point in words."""
    return f"{point.db:.1f} dB" if point.noise > 0 else "no noise"


def curve_of(
    items: Sequence[knapsack.Options],
    words: Sequence[Sequence[str]],
    schemes: Iterable[str],
    picks: Sequence[int],
    rest: int,
    how: str,
) -> MixCurve:
    """Return the curve of a knapsack.

    Args:
        words: the names of each item's options. picks: the options that were chosen.
        rest: bytes of all that is no item.
    """
    steps = knapsack.sweep(items)
    every = max(1, -(-len(steps) // POINTS))
    some = [*steps[::every], *(steps[-1:] if (len(steps) - 1) % every else ())]
    return MixCurve(
        mixes=tuple(CurvePoint(label="mix", bytes=rest + cost.bytes, noise=cost.noise) for cost in some),
        schemes=tuple(sorted(_uniform(items, words, schemes, rest), key=lambda point: (point.bytes, point.label))),
        pick=CurvePoint(label="mix", bytes=rest + _sum(items, picks).bytes, noise=_sum(items, picks).noise),
        how=how,
    )


def _uniform(
    items: Sequence[knapsack.Options], words: Sequence[Sequence[str]], schemes: Iterable[str], rest: int
) -> Iterable[CurvePoint]:
    """Yield a point for each scheme: weights that it does not fit stay as they are, the last option of each."""
    for scheme in schemes:
        picks = [each.index(scheme) if scheme in each else len(each) - 1 for each in words]
        if any(scheme in each for each in words):
            whole = _sum(items, picks)
            yield CurvePoint(label=scheme, bytes=rest + whole.bytes, noise=whole.noise)


def _sum(items: Sequence[knapsack.Options], picks: Sequence[int]) -> knapsack.Cost:
    costs = [options[pick] for options, pick in zip(items, picks, strict=True)]
    return knapsack.Cost(sum(one.bytes for one in costs), sum(one.noise for one in costs))

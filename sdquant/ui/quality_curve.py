"""Quality against bytes as an SVG: of a comparison, with a point for each scheme, and as predicted for a mix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..planning import AUTO
from ..utils.byte_sizes import size
from .html_components import escape

if TYPE_CHECKING:
    from ..evaluation import ComparisonRow
    from ..planning import CurvePoint, MixCurve

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 70, 16, 40
_LINES = 4  # of the grid
_BEST = 60.0  # dB; an equal image has no PSNR, and is drawn here
_NEAR = (70, 13)  # pixels: names that are nearer would cover each other


@dataclass(frozen=True)
class _Point:
    """A point of the picture. is_pick: marked, as what the user asked for."""

    bytes: int
    db: float
    label: str
    is_pick: bool = False


def curve(rows: Sequence[ComparisonRow]) -> str:
    """Format the rows that have both bytes and a PSNR; "" for fewer than two. Mixes are marked.

    The line joins the schemes that no smaller one is better than.
    """
    points = sorted(
        (_Point(row.bytes, min(_BEST, row.psnr), row.label, row.label.startswith(AUTO)) for row in rows
         if row.bytes is not None and row.psnr is not None),
        key=lambda point: (point.bytes, point.db),
    )  # fmt: skip
    if len(points) < 2:
        return ""
    best, front = float("-inf"), []
    for point in points:
        if point.db > best:
            best = point.db
            front.append(point)
    return _svg(points, front, "size of the weights; higher is closer to the first", "Quality against bytes")


def predicted(mixes: MixCurve) -> str:
    """Format the predicted quality of mixes, of one scheme for all weights, and of the chosen mix; "" without noise."""
    line = [_of(point) for point in mixes.mixes if point.noise > 0]
    points = [_of(point) for point in mixes.schemes if point.noise > 0]
    if mixes.pick is not None and mixes.pick.noise > 0:
        points.append(_of(mixes.pick, is_pick=True))
    if not line:
        return ""
    how = {"statistics": "by calibration", "weights": "by the weights", "names": "a guess by the layers' names"}
    words = f"predicted signal to noise of the outputs, {how[mixes.how]}; the line: mixes"
    return _svg(points, line, words, "Predicted quality against bytes")


def _of(point: CurvePoint, *, is_pick: bool = False) -> _Point:
    return _Point(point.bytes, point.db, "chosen mix" if is_pick else point.label, is_pick)


def _svg(points: Sequence[_Point], line: Sequence[_Point], axis: str, title: str) -> str:
    every = [*points, *line]
    most = max(point.bytes for point in every) * 1.05
    low, high = min(point.db for point in every) - 3, max(point.db for point in every) + 2

    def place(nbytes: float, db: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * nbytes / most
        return across, _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - db) / (high - low)

    parts = []
    for number in range(_LINES + 1):
        share = number / _LINES
        x, y = place(most * share, low + (high - low) * share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="sq-grid"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{low + (high - low) * share:.0f} dB</text>'
        )
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{size(int(most * share))}</text>')
    front = " ".join("{:.1f},{:.1f}".format(*place(point.bytes, point.db)) for point in line)
    parts.append(f'<polyline points="{front}" class="sq-line"/>')
    named: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: not point.is_pick):
        x, y = place(point.bytes, point.db)
        kind, radius = (' class="sq-picked"', 7) if point.is_pick else ("", 5)
        words = f"{escape(point.label)}: {size(point.bytes)}, {point.db:.1f} dB"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"{kind}><title>{words}</title></circle>')
        if all(abs(x - left) > _NEAR[0] or abs(y - top) > _NEAR[1] for left, top in named):
            parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" class="sq-name">{escape(point.label)}</text>')
            named.append((x, y))
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{axis}</text>')
    summary = ", ".join(f"{point.label} {size(point.bytes)} {point.db:.1f} dB" for point in points)
    return (
        f'<div class="sq-scroll"><svg class="sq-curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{title}: {escape(summary)}">{"".join(parts)}</svg></div>'
    )

"""A mix as a picture: a bar for each block by format, and below it quality against bytes with the chosen point."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..planning import blocks_of, mix_blocks
from ..utils import figure
from ..utils.byte_sizes import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..planning import MixBlock, MixCurve, Plan

WIDE, NAME, NUMBER = 640, 230, 150  # pixels: of the bars, and of the words beside them
ROW, BAR, CURVE, GAP = 20, 14, 260, 24  # pixels
NEAR = (80, 14)  # pixels: names that are nearer would cover each other
MOST = 80  # bars: those of the most bytes


def mix_sheet(plan: Plan) -> Any:
    """Draw the mix of a plan that has one, as a PIL image."""
    assert plan.curve is not None
    rows = _few(blocks_of(plan))
    bits = mix_blocks.bits_of(plan)
    facts = [f"{size(plan.bytes)} of weights", figure_of(plan.curve), *filter(None, [plan.family])]
    legend = ["Line: the best mix of each size, and the chosen one. Points: one scheme for all weights."]
    sheet, (bars, curve) = figure.grid(
        [NAME + WIDE + NUMBER], [ROW * (len(rows) + 2), CURVE], Path(plan.path).name, facts, legend, gap=(0, GAP)
    )
    _bars(bars, rows, bits)
    _curve(curve, plan.curve)
    return figure.rendered(sheet)


def figure_of(curve: MixCurve) -> str:
    """Describe the quality of the chosen mix."""
    how = {"statistics": "by calibration", "weights": "by the weights", "names": "a guess"}[curve.how]
    noisy = curve.pick is not None and curve.pick.noise > 0
    return f"about {curve.pick.db:.1f} dB of the outputs, {how}" if noisy and curve.pick else "nothing quantized"


def _few(rows: list[MixBlock]) -> list[MixBlock]:
    """Return at most MOST rows; what is left is those of most bytes, in their order."""
    largest = sorted(rows, key=lambda row: -sum(row.bytes.values()))[:MOST]
    return [row for row in rows if row in largest]


def _bars(axes: Axes, rows: list[MixBlock], bits: Mapping[str, float]) -> None:
    most = max((sum(row.bytes.values()) for row in rows), default=1)
    for number, row in enumerate(rows):
        top = float(number * ROW)
        axes.text(0, top + BAR / 2, figure.fit(row.name, NAME), va="center")
        left = float(NAME)
        for word, nbytes in row.bytes.items():
            wide = WIDE * nbytes / most
            axes.barh(top, wide, BAR, left, align="edge", color=mix_blocks.colour_of(bits[word]), clip_on=False)
            left += wide
        text = f"{row.bits:.1f} bits, {size(sum(row.bytes.values()))}"
        axes.text(left + 8, top + BAR / 2, text, va="center", color=figure.SOFT)
    left, under = float(NAME), float(ROW * (len(rows) + 1))
    for some in sorted(set(bits.values())):
        words = ", ".join(word for word, own in bits.items() if own == some)
        axes.barh(under, BAR, BAR, left, align="edge", color=mix_blocks.colour_of(some), clip_on=False)
        axes.text(left + BAR + 6, under + BAR / 2, words, va="center", color=figure.SOFT)
        left += BAR + 24 + figure.LETTER * len(words)


def _curve(axes: Axes, curve: MixCurve) -> None:
    noisy = [point for point in curve.mixes if point.noise > 0]
    schemes = [point for point in curve.schemes if point.noise > 0]
    mark = curve.pick if curve.pick is not None and curve.pick.noise > 0 else None
    points = [*noisy, *schemes, *filter(None, [mark])]
    if not points:
        return
    wide, high = axes.get_xlim()[1] - NUMBER, CURVE - 40
    most = max(point.bytes for point in points)
    low, top = min(point.db for point in points) - 2, max(point.db for point in points) + 2

    def place(nbytes: float, db: float) -> tuple[float, float]:
        return wide * nbytes / most, 20 + high * (top - db) / (top - low)

    for share in (0.25, 0.5, 0.75, 1.0):
        x, _ = place(most * share, low)
        axes.plot([x, x], [20, 20 + high], color=figure.RULE, linewidth=1)
        axes.text(x, CURVE - 4, size(int(most * share)), color=figure.SOFT, ha="center", va="bottom")
    for number in range(4):
        db = low + (top - low) * number / 3
        axes.plot([0, wide], [place(0, db)[1]] * 2, color=figure.RULE, linewidth=1)
        axes.text(0, place(0, db)[1] - 3, f"{db:.0f} dB", color=figure.SOFT)
    if noisy:
        axes.plot(*zip(*(place(point.bytes, point.db) for point in noisy), strict=True), color=figure.BAR, linewidth=2)
    named: list[tuple[float, float]] = []
    for point in sorted(schemes, key=lambda point: point.noise):
        x, y = place(point.bytes, point.db)
        axes.plot([x], [y], "o", color=figure.SOFT, markersize=4)
        if all(abs(x - left) > NEAR[0] or abs(y - top) > NEAR[1] for left, top in named):
            axes.text(x + 6, y + 4, point.label, color=figure.SOFT)
            named.append((x, y))
    if mark is not None:
        x, y = place(mark.bytes, mark.db)
        axes.plot([x], [y], "o", color=figure.WRONG, markersize=9)
        axes.text(x - 8, y - 6, f"{size(mark.bytes)}, {mark.db:.1f} dB", ha="right", weight="bold")

"""A comparison as a curve of quality against bytes: an SVG, with a point for each scheme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..utils.byte_sizes import size
from .html_components import escape

if TYPE_CHECKING:
    from ..evaluation import ComparisonRow

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 70, 16, 40
_LINES = 4  # of the grid
_BEST = 60.0  # dB; an equal image has no PSNR, and is drawn here


def curve(rows: Sequence[ComparisonRow]) -> str:
    """Format the rows that have both bytes and a PSNR; "" for fewer than two.

    The line joins the schemes that no smaller one is better than.
    """
    points = sorted(
        (row.bytes, min(_BEST, row.psnr), row.label) for row in rows if row.bytes is not None and row.psnr is not None
    )
    if len(points) < 2:
        return ""
    most = max(nbytes for nbytes, _, _ in points) * 1.05
    low = min(psnr for _, psnr, _ in points) - 3
    high = max(psnr for _, psnr, _ in points) + 2

    def place(nbytes: float, psnr: float) -> tuple[float, float]:
        across = _LEFT + (_WIDTH - _LEFT - _RIGHT) * nbytes / most
        return across, _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - psnr) / (high - low)

    parts = []
    for number in range(_LINES + 1):
        share = number / _LINES
        x, y = place(most * share, low + (high - low) * share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="sq-grid"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{low + (high - low) * share:.0f} dB</text>'
        )
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{size(int(most * share))}</text>')
    best, front = float("-inf"), []
    for nbytes, psnr, _ in points:
        if psnr > best:
            best = psnr
            front.append("{:.1f},{:.1f}".format(*place(nbytes, psnr)))
    parts.append(f'<polyline points="{" ".join(front)}" class="sq-line"/>')
    for nbytes, psnr, label in points:
        x, y = place(nbytes, psnr)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(label)}: {size(nbytes)}, {psnr:.1f} dB</title>'
            f'</circle><text x="{x + 8:.1f}" y="{y + 4:.1f}" class="sq-name">{escape(label)}</text>'
        )
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">size of the weights; higher is closer to the '
        "first</text>"
    )
    summary = ", ".join(f"{label} {size(nbytes)} {psnr:.1f} dB" for nbytes, psnr, label in points)
    return (
        f'<svg class="sq-curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Quality against bytes: {escape(summary)}">{"".join(parts)}</svg>'
    )

"""The one module that imports matplotlib: figures in pixels, without pyplot, whose state all threads share."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import BackendUnavailableError
from .install import install_extra
from .process_state import no_warnings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SOFT, RULE, PAPER, TRACK, BAR, WRONG = "#70747e", "#e2e3e6", "#fcfcfa", "#e4e6eb", "#3670b2", "#cd3430"
DPI = 86.4  # matplotlib's usual text has 10 points, 12 pixels then
LETTER = 7  # pixels: the mean width of such letters, rather too much
MARGIN, HEAD, LINE = 32, 112, 18  # pixels: beside the axes, above them, and for a line of the legend


def require() -> None:
    """Raise BackendUnavailableError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailableError(
            "Cannot draw a figure", "it needs matplotlib, which is not installed", f"Run: {install_extra('figures')}"
        )


def grid(
    widths: Sequence[int],
    heights: Sequence[int],
    title: str,
    facts: Sequence[str],
    legend: Sequence[str] = (),
    *,
    gap: tuple[int, int] = (0, 0),
    left: int = MARGIN,
) -> tuple[Figure, list[Axes]]:
    """Create a figure with empty axes, row by row. In their coordinates a unit is a pixel, from the top left.

    Args:
        widths, heights: of the columns and rows of axes, in pixels. gap: from column to column and from row to row.
        title, facts: above the axes, in a line and in two at most. legend: lines below them.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    require()
    from matplotlib.figure import Figure

    width, height = (sum(cells) + apart * (len(cells) - 1) for cells, apart in zip((widths, heights), gap, strict=True))
    foot = gap[1] + MARGIN + LINE * len(legend)
    whole, high = left + width + MARGIN, HEAD + height + foot
    figure = Figure((whole / DPI, high / DPI), DPI, facecolor=PAPER)
    rows = figure.subplots(
        len(heights), len(widths), squeeze=False, width_ratios=widths, height_ratios=heights,
        subplot_kw={"facecolor": PAPER, "frame_on": False, "xticks": (), "yticks": ()},
        gridspec_kw={
            "left": left / whole, "right": 1 - MARGIN / whole, "top": 1 - HEAD / high, "bottom": foot / high,
            "wspace": gap[0] * len(widths) / sum(widths), "hspace": gap[1] * len(heights) / sum(heights),
        },
    )  # fmt: skip
    for row, down in zip(rows, heights, strict=True):
        for axes, across in zip(row, widths, strict=True):
            axes.set(xlim=(0, across), ylim=(down, 0))
    x, room = MARGIN / whole, whole - 2 * MARGIN
    figure.suptitle(fit(title, room / 1.6), x=x, y=1 - 24 / high, ha="left", va="top", size=16)
    figure.text(x, 1 - 54 / high, fit(", ".join(facts), room, 2), color=SOFT, va="top")
    figure.text(x, 24 / high, "\n".join(fit(line, room) for line in legend), color=SOFT, linespacing=1.5)
    return figure, list(rows.flat)


def fit(text: str, room: float, lines: int = 1) -> str:
    """Return a text in at most `lines` lines of about `room` pixels; the rest is cut off."""
    letters = max(1, int(room / LETTER))
    rows = textwrap.wrap(text, letters) or [""]
    if len(rows) > lines:
        rows[lines - 1] = rows[lines - 1][: letters - 1] + "\u2026"
    return "\n".join(rows[:lines])


def show(axes: Axes, picture: Any, left: float, top: float, size: tuple[float, float]) -> None:
    """Draw a PIL image at a place, of a size, in pixels: enlarged without blur, or reduced smoothly."""
    axes.imshow(
        picture.convert("RGB"), extent=(left, left + size[0], top + size[1], top), aspect="auto",
        interpolation="nearest" if picture.width <= size[0] else "lanczos",
    )  # fmt: skip


def frame(axes: Axes, left: float, top: float, size: tuple[float, float], colour: str = RULE, line: int = 1) -> None:
    """Draw an empty frame of a size at a place, in pixels."""
    axes.bar(left, size[1], size[0], top, align="edge", fill=False, edgecolor=colour, linewidth=line, clip_on=False)


def bar(axes: Axes, top: float, width: float, share: float, colour: str = BAR) -> None:
    """Draw a bar, `share` of it filled."""
    axes.barh([top] * 2, [width, width * min(share, 1)], 6, align="edge", color=[TRACK, colour], clip_on=False)


def rendered(figure: Figure) -> Any:
    """Return a figure as a PIL image. A dollar is no formula in it, and a letter that the font lacks is a box."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    from PIL import Image

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    canvas: Any = FigureCanvasAgg(figure)
    with no_warnings:  # about letters that the font lacks
        canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")

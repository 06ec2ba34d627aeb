"""A comparison as one picture: a column for each scheme with image, difference and numbers; columns wrap into lines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..planning import NOT_QUANTIZED
from ..utils import figure
from ..utils.byte_sizes import size
from ..utils.figure import SOFT, WRONG

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .benchmark.results import Benchmark
    from .comparison import Comparison, ComparisonRow

COLUMNS = 5  # in a line at the most
LEAST, MOST = 256, 384  # pixels: a picture's longer side on the sheet
GAP, BETWEEN, CAPTION, PAD = 24, 6, 128, 12  # pixels; BETWEEN: picture and difference; CAPTION: from line to line


def sheet(comparison: Comparison, columns: int = COLUMNS) -> Any:
    """The comparison as a PIL image, with at most `columns` schemes in a line."""
    shown, schemes = _shown(comparison.size), len(comparison.rows)
    lines = math.ceil(schemes / min(max(columns, 1), schemes))
    across = math.ceil(schemes / lines)  # lines of about the same length
    wide = max(across, 2)  # so that there is room for the words
    facts = [Path(comparison.model).name, "x".join(map(str, comparison.size))]
    facts += [f"{comparison.steps} steps", f"seed {comparison.seed}"]
    facts += [f"guidance {comparison.guidance:g}"] if comparison.guidance is not None else []
    facts += [f"{name.replace('_', ' ')} {_value(value)}" for name, value in comparison.settings.items()]
    legend = f"Below each image: its difference from the first, {comparison.amplify} times as bright."
    drawn, places = figure.grid(
        [max(shown[0], LEAST)] * wide, [2 * shown[1] + BETWEEN] * lines, f"\u201c{comparison.prompt}\u201d", facts,
        [legend, machine_of(comparison)], gap=(GAP, CAPTION),
    )  # fmt: skip
    for axes, row in zip(places[:: wide // across], comparison.rows, strict=False):
        _column(axes, row, shown)
    return figure.rendered(drawn)


def machine_of(result: Comparison | Benchmark) -> str:
    """Return the name of the device and the versions of torch and diffusers."""
    devices = {row["torch_name"]: row["name"] for row in result.machine["devices"]}
    packages = [f"{name} {result.versions[name]}" for name in ("torch", "diffusers") if name in result.versions]
    return ", ".join([devices.get(result.device, result.device), *packages])


def _shown(size: tuple[int, int]) -> tuple[int, int]:
    """Return a picture's size on the sheet: small ones scaled by a whole number, large ones reduced."""
    longer = max(size)
    if longer <= MOST:
        times = max(1, LEAST // longer)
        return size[0] * times, size[1] * times
    return max(1, round(size[0] * MOST / longer)), max(1, round(size[1] * MOST / longer))


def _column(axes: Axes, row: ComparisonRow, shown: tuple[int, int]) -> None:
    """Draw an image, its difference and its numbers, or the reason why there is none."""
    cell, height = axes.get_xlim()[1], 2 * shown[1] + BETWEEN
    name = "not quantized" if row.label == NOT_QUANTIZED else row.label
    axes.set_title(figure.fit(name, cell / 1.2), loc="left")
    if row.error is not None:
        figure.frame(axes, 0, 0, (cell, height))
        why = figure.fit(row.error, cell - 2 * PAD, max(1, (height - 2 * PAD) // 16))
        axes.text(PAD, PAD, why, color=SOFT, va="top")
        axes.set_xlabel("no image", loc="left", color=WRONG)
        return
    figure.show(axes, row.image, 0, 0, shown)
    if row.difference is not None:
        figure.show(axes, row.difference, 0, shown[1] + BETWEEN, shown)
    else:
        figure.frame(axes, 0, shown[1] + BETWEEN, shown)
        axes.text(shown[0] / 2, height - shown[1] / 2, "reference", color=SOFT, ha="center", va="center")
    if row.bytes is not None and row.bytes_bf16:
        share = row.bytes / row.bytes_bf16
        figure.bar(axes, height + BETWEEN, cell, share)
        seconds = f"load {row.load_seconds:.1f} s, draw {row.draw_seconds:.1f} s"
        numbers = f"{size(row.bytes)}, {share:.0%} of bf16\n{_distance(row)}\n{seconds}"
        axes.set_xlabel(numbers, loc="left", labelpad=16, linespacing=1.5)


def _distance(row: ComparisonRow) -> str:
    """Describe how far the image is from the reference."""
    if row.psnr is None:
        return "the others are compared with this"
    if row.identical:
        return "the same pixels"
    return f"{row.psnr:.1f} dB, largest difference {row.largest} of 255"


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

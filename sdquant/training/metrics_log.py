"""Metrics of a training: log.jsonl with a line for each step, and a plot of the loss."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..utils.figure import BAR, INK, RULE, SOFT, Sheet

WIDTH, HEIGHT = 960, 540
LEFT, RIGHT, TOP, BOTTOM = 92, 28, 84, 62  # pixels around the axes
THIN = (176, 198, 222)  # of each step's loss


@dataclass(frozen=True, kw_only=True)
class Line:
    """Metrics of one step. `grad_norm` is measured before clipping."""

    step: int
    loss: float
    lr: float
    grad_norm: float


class Log:
    """log.jsonl of a run.

    Args:
        upto: last step to keep of an existing log; a resumed training repeats the later ones.
    """

    def __init__(self, path: Path, upto: int) -> None:
        from ..utils.atomic_write import whole_file

        self.lines = [line for line in read(path) if line.step <= upto]
        with whole_file(path) as file:
            file.write("".join(_text(line) for line in self.lines).encode())
        self._file = path.open("a", encoding="utf-8")

    def add(self, line: Line) -> None:
        """Append a line."""
        self.lines.append(line)
        self._file.write(_text(line))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _text(line: Line) -> str:
    return json.dumps(asdict(line)) + "\n"


def read(path: Path) -> list[Line]:
    """Read a log; return no lines if it does not exist. An incomplete last line is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if text.endswith("\n"):
            lines.append(Line(**json.loads(text)))
    return lines


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round tick values between `low` and `high`, at steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return exponential running means with a half-life of a twentieth of the length."""
    keep = 0.5 ** (20 / max(len(values), 20))
    means: list[float] = []
    total = weight = 0.0
    for value in values:
        total, weight = total * keep + value, weight * keep + 1
        means.append(total / weight)
    return means


def curve(lines: Sequence[Line], title: str) -> Any:
    """Plot the loss over the steps as a PIL image: each step as a thin line, the running mean as a thick one."""
    sheet = Sheet(WIDTH, HEIGHT)
    steps, losses = [line.step for line in lines], [line.loss for line in lines]
    means = smoothed(losses)
    top = max(means) * 1.02 if len(losses) < 3 else max(max(means), sorted(losses)[int(len(losses) * 0.98)]) * 1.05
    last, top = max(steps[-1], 2), top or 1.0
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(step: float, loss: float) -> tuple[float, float]:
        return LEFT + plot_width * (step - 1) / (last - 1), TOP + plot_height * (1 - min(loss, top) / top)

    sheet.text((LEFT, 28), title, "title", room=plot_width)
    sheet.text((LEFT, 56), f"mean squared error; last {means[-1]:.4g} (running mean), {steps[-1]} steps", "small", SOFT)
    for value in ticks(0, top):
        y = at(1, value)[1]
        sheet.pen.line((LEFT, y, WIDTH - RIGHT, y), fill=RULE)
        sheet.text((LEFT - 10, y), f"{value:.6g}", "small", SOFT, "rm")
    for value in sorted({1.0, *(tick for tick in ticks(1, last, 8) if tick >= 1)}):
        x = at(value, 0)[0]
        sheet.pen.line((x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 5), fill=SOFT)
        sheet.text((x, HEIGHT - BOTTOM + 17), f"{value:g}", "small", SOFT, "mm")
    sheet.text((LEFT + plot_width / 2, HEIGHT - 16), "step", "small", INK, "mm")
    sheet.text((LEFT - 10, TOP - 14), "loss", "small", INK, "rm")
    for values, colour, width in ((losses, THIN, 1), (means, BAR, 3)):
        points = [at(*pair) for pair in zip(steps, values, strict=True)]
        if len(points) > 1:
            sheet.pen.line(points, fill=colour, width=width, joint="curve")
        else:
            sheet.pen.circle(points[0], 3, fill=BAR)
    return sheet.image

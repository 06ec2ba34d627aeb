"""Metrics of a training: log.jsonl with a line for each step, and a plot of the loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..utils import figure

WIDTH, HEIGHT, LEFT = 836, 390, 92  # pixels: of the axes, and beside them
THIN = "#b0c6de"  # of each step's loss


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
    texts = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Line(**json.loads(text)) for text in texts if text.endswith("\n")]


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
    steps, losses = [line.step for line in lines], [line.loss for line in lines]
    means = smoothed(losses)
    top = max(means) * 1.02 if len(losses) < 3 else max(max(means), sorted(losses)[int(len(losses) * 0.98)]) * 1.05
    facts = [f"mean squared error; last {means[-1]:.4g} (running mean)", f"{steps[-1]} steps"]
    drawn, (axes,) = figure.grid([WIDTH], [HEIGHT], title, facts, gap=(0, 24), left=LEFT)
    axes.clear()  # now with ticks
    axes.set(xlim=(1, max(steps[-1], 2)), ylim=(0, top or 1.0), xlabel="step", ylabel="loss")
    axes.locator_params("x", integer=True)
    axes.grid(axis="y", color=figure.RULE)
    axes.plot(steps, losses, color=THIN, linewidth=1)
    axes.plot(steps, means, "" if len(lines) > 1 else "o", color=figure.BAR, linewidth=3, clip_on=len(lines) > 1)
    return figure.rendered(drawn)

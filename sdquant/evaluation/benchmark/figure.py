"""A benchmark as one picture: a line for each row, with bars of its step, its memory and its load, and its accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...utils.byte_sizes import size
from ...utils.figure import BAR, INK, RULE, SOFT, TRACK, WRONG, Sheet

if TYPE_CHECKING:
    from .results import Benchmark, BenchmarkRow

MARGIN, HEAD, FOOT, LINE = 32, 124, 56, 44  # pixels
NAME, COLUMN, GAP, SNR = 250, 190, 28, 90
THEIRS = (150, 152, 160)  # of the bars of peers


@dataclass(frozen=True)
class _Column:
    """A column of bars: its title, the value that sets a bar's length, and the text above the bar."""

    title: str
    value: Callable[[BenchmarkRow], float | None]
    text: Callable[[BenchmarkRow], str]


def sheet(benchmark: Benchmark) -> Any:
    """Draw the benchmark as a PIL image."""
    columns = (
        _Column("one step", lambda row: row.ratio, _step),
        _Column("weights", lambda row: row.bytes, lambda row: size(row.bytes or 0)),
        _Column(f"peak memory ({benchmark.memory})", lambda row: row.peak, lambda row: size(row.peak or 0)),
        _Column("load", lambda row: row.load_seconds, lambda row: f"{row.load_seconds:.2f} s"),
    )
    inner = NAME + len(columns) * (COLUMN + GAP) + SNR
    canvas = _Sheet(2 * MARGIN + inner, HEAD + LINE * len(benchmark.rows) + FOOT)
    canvas.head(benchmark, inner)
    left = MARGIN + NAME
    for column in columns:
        canvas.text((left, HEAD - 18), column.title, "small", SOFT)
        most = max((column.value(row) or 0 for row in benchmark.rows), default=0) or 1
        for number, row in enumerate(benchmark.rows):
            if row.error is None:
                canvas.column(row, column, left, HEAD + LINE * number, most)
        left += COLUMN + GAP
    canvas.text((left + SNR, HEAD - 18), "SNR", "small", SOFT, "rm")
    for number, row in enumerate(benchmark.rows):
        canvas.row(row, HEAD + LINE * number, inner)
    canvas.foot(benchmark, inner)
    return canvas.image


def _step(row: BenchmarkRow) -> str:
    return f"{row.ratio:.2f} x    {seconds(row.step_seconds or 0)}"


def seconds(value: float) -> str:
    """Format seconds for people: "81 ms", "2.31 s"."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def decibels(row: BenchmarkRow) -> str:
    """Format the SNR of a row's output against the reference's."""
    return "-" if row.snr is None else "same" if row.identical else f"{row.snr:.1f} dB"


class _Sheet(Sheet):
    """Draws the parts of the sheet."""

    def head(self, benchmark: Benchmark, room: float) -> None:
        """Draw the heading: the model and the settings that all rows share."""
        facts = [
            benchmark.case,
            f"{benchmark.inputs} inputs",
            f"{benchmark.rounds} rounds of {benchmark.steps}",
            f"{benchmark.threads} threads",
        ]
        facts += [f"{name} {value}" for name, value in benchmark.settings.items() if name != "offload"]
        self.text((MARGIN, 34), Path(benchmark.model).name, "title", room=room)
        self.text((MARGIN, 62), "   ".join(facts), "small", SOFT, room=room)
        self.pen.line((MARGIN, 82, MARGIN + room, 82), fill=RULE)

    def column(self, row: BenchmarkRow, column: _Column, left: int, top: int, most: float) -> None:
        """Draw one bar, blue for sdquant and grey for other libraries."""
        value = column.value(row)
        if value is None:
            return
        self.text((left, top + 12), column.text(row), "small")
        self.pen.rounded_rectangle((left, top + 24, left + COLUMN, top + 30), 3, fill=TRACK)
        length = max(6.0, COLUMN * value / most)
        fill = BAR if row.by == "sdquant" else THEIRS
        self.pen.rounded_rectangle((left, top + 24, left + length, top + 30), 3, fill=fill)

    def row(self, row: BenchmarkRow, top: int, room: float) -> None:
        """Draw a row's name, and its accuracy or the reason why it was not measured."""
        self.text((MARGIN, top + 20), row.name, "text", room=NAME - 16)
        if row.error is not None:
            wide = room - NAME
            lines = self.wrapped(row.error, "small", wide, 2)
            for number, line in enumerate(lines):
                self.text((MARGIN + NAME, top + 12 + 18 * number), line, "small", WRONG)
            return
        self.text((MARGIN + room, top + 20), decibels(row), "small", INK, "rm")

    def foot(self, benchmark: Benchmark, room: float) -> None:
        """Draw the legend: the meaning of ratios and SNR, the device and the versions."""
        packages = [
            f"{name} {benchmark.versions[name]}" for name in ("torch", "diffusers") if name in benchmark.versions
        ]
        below = self.image.height - 24
        legend = (
            f"x: against the first row, {benchmark.clock} time, median of rounds. "
            "SNR: of one step's output. Grey: others."
        )
        self.text((MARGIN, below), legend, "small", SOFT)
        device = next(
            (row["name"] for row in benchmark.machine["devices"] if row["torch_name"] == benchmark.device),
            benchmark.device,
        )
        rest = room - self.width_of(legend, "small") - GAP
        self.text((MARGIN + room, below), self.cut(", ".join([device, *packages]), "small", rest), "small", SOFT, "rm")

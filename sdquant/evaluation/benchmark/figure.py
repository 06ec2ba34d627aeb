"""A benchmark as one picture: a line for each row, with bars of its step, its memory and its load, and its accuracy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...utils import figure
from ...utils.byte_sizes import size
from ..compare_figure import machine_of

if TYPE_CHECKING:
    from .results import Benchmark, BenchmarkRow

NAME, COLUMN, GAP, LINE = 282, 190, 28, 44  # pixels
THEIRS = "#9698a0"  # of the bars of peers, blue for sdquant


def sheet(benchmark: Benchmark) -> Any:
    """Draw the benchmark as a PIL image."""
    # Titles, the values that set a bar's length, and the texts above the bars.
    columns: tuple[tuple[str, Callable[[BenchmarkRow], float | None], Callable[[BenchmarkRow], str]], ...] = (
        ("one step", lambda row: row.ratio, lambda row: f"{row.ratio:.2f} x    {seconds(row.step_seconds or 0)}"),
        ("weights", lambda row: row.bytes, lambda row: _size(row.bytes)),
        (f"peak memory ({benchmark.memory})", lambda row: row.peak, lambda row: _size(row.peak)),
        ("load", lambda row: row.load_seconds, lambda row: f"{row.load_seconds:.2f} s"),
        ("SNR", lambda row: None, decibels),
    )
    facts = [benchmark.case, f"{benchmark.inputs} inputs", f"{benchmark.rounds} rounds of {benchmark.steps}"]
    facts += [f"{benchmark.threads} threads"]
    facts += [f"{name} {value}" for name, value in benchmark.settings.items() if name != "offload"]
    ratio = f"x: against the first row, {benchmark.clock} time, median of rounds."
    drawn, places = figure.grid(
        [COLUMN] * len(columns), [LINE * len(benchmark.rows)], Path(benchmark.model).name, facts,
        [f"{ratio} SNR: of one step's output. Grey: others.", machine_of(benchmark)], gap=(GAP, 0), left=NAME,
    )  # fmt: skip
    rows = [(LINE * (number + 0.5), row) for number, row in enumerate(benchmark.rows)]
    names = [figure.fit(row.name, NAME - figure.MARGIN - 12) for _, row in rows]
    places[0].set_yticks([middle for middle, _ in rows], names)
    places[0].tick_params(length=0, pad=12)
    for axes, (title, value, text) in zip(places, columns, strict=True):
        axes.set_title(title, loc="left")
        most = max((value(row) or 0 for _, row in rows), default=0) or 1
        for middle, row in rows:
            length = value(row)
            if row.error is None:
                axes.text(0, middle, text(row), va="bottom")
                if length is not None:
                    colour = figure.BAR if row.by == "sdquant" else THEIRS
                    figure.bar(axes, middle + 4, COLUMN, length / most, colour)
    for middle, row in rows:
        if row.error is not None:
            why = figure.fit(row.error, len(columns) * COLUMN, 2)
            places[0].text(0, middle, why, color=figure.WRONG, va="center")
    return figure.rendered(drawn)


def _size(number: int | None) -> str:
    return "" if number is None else size(number)


def seconds(value: float) -> str:
    """Format seconds for people: "81 ms", "2.31 s"."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def decibels(row: BenchmarkRow) -> str:
    """Format the SNR of a row's output against the reference's."""
    return "-" if row.snr is None else "same" if row.identical else f"{row.snr:.1f} dB"

"""The demo's picture: a line for each scheme, a panel for each model, and the memory each scheme takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..models import bundled_path
from ..utils import figure, images
from ..utils.byte_sizes import size
from .run import DemoRow, Result, SkippedCase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 10
CELL, GAP, LINE, LABEL, FACTS = 52, 4, 64, 208, 200  # pixels; CELL: a digit's side, LINE: from line to line
DIGITS = COLUMNS * (CELL + GAP) - GAP


def write(results: Sequence[Result], target: Path) -> None:
    """Draw the sheet and write it as PNG, with a palette that keeps rare colours, in half the bytes."""
    from PIL import Image

    few = demo_sheet(results).quantize(method=Image.Quantize.MAXCOVERAGE, kmeans=1)
    images.save(few, target, optimize=True)


def demo_sheet(results: Sequence[Result]) -> Any:
    """Return the figure as a PIL image. All results must have the same cases in the same order."""
    cases = results[0].cases
    drawn, places = figure.grid(
        [DIGITS, FACTS] * len(results), [LINE * len(cases)], "The same digits in every scheme",
        ["prompts \u201ca handwritten zero\u201d to \u201ca handwritten nine\u201d", "the same noise in every line"],
        [
            f"Red frames: read as another digit by a classifier that is right on {results[0].judge:.1%} of real ones.",
            "Bars: weights of the whole pipeline against bf16; the VAE is never quantized.",
        ],
        gap=(24, 0), left=LABEL,
    )  # fmt: skip
    labels = [f"{case.label}\n{case.backend}" for case in cases]
    places[0].set_yticks([LINE * number + CELL / 2 for number in range(len(cases))], labels)
    places[0].tick_params(length=0, pad=12)
    for digits, facts, result in zip(places[::2], places[1::2], results, strict=True):
        whole = f", {size(result.rows[0].bytes_bf16)} in bf16" if result.rows else ""
        title = f"{result.model}: {_pipeline_class(result.model)}{whole}, {result.steps} steps"
        digits.set_title(title, loc="left")
        facts.set_title("weights in memory", loc="left", size="medium")
        facts.set_title("digits right", loc="right", size="medium")
        for number, case in enumerate(result.cases):
            _line(digits, facts, case, LINE * number)
    return figure.rendered(drawn)


def _line(digits: Axes, facts: Axes, case: DemoRow | SkippedCase, top: int) -> None:
    """Draw the digits and numbers of a case, or the reason why it was skipped."""
    middle = top + CELL / 2
    if isinstance(case, SkippedCase):
        fix = case.fix.partition(". Or use")[0]
        digits.text(0, middle, figure.fit(f"skipped: {fix}", DIGITS + FACTS), color=figure.SOFT, va="center")
        return
    for column, picture in enumerate(case.pictures[:COLUMNS]):
        left = column * (CELL + GAP)
        figure.show(digits, picture, left, top, (CELL, CELL))
        if case.wanted[column] != case.seen[column]:
            figure.frame(digits, left, top, (CELL, CELL), figure.WRONG, 3)
    share = case.bytes / case.bytes_bf16
    facts.text(0, middle - 6, f"{size(case.bytes)}, {share:.0%}", va="bottom")
    facts.text(FACTS, middle - 6, f"{case.right} / {case.images}", va="bottom", ha="right")
    figure.bar(facts, middle - 3, FACTS, share)
    if case.psnr is not None:
        similarity = "same pixels" if case.psnr == float("inf") else f"PSNR {case.psnr:.1f} dB"
        facts.text(FACTS, middle + 8, similarity, color=figure.SOFT, va="top", ha="right")


def _pipeline_class(model: str) -> str:
    import json

    name: str = json.loads((bundled_path(model) / "model_index.json").read_text())["_class_name"]
    return name

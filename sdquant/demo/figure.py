"""The demo's picture: a line for each scheme, a panel for each model, and the memory each scheme takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..planning.bundled_models import path
from ..utils import images
from ..utils.byte_sizes import size
from ..utils.figure import RULE, SOFT, WRONG, Sheet, few_colours
from .run import DemoRow, Result, SkippedCase

COLUMNS = 10
CELL, GAP, LINE = 52, 4, 64  # pixels: a digit's side, between two digits, from line to line
LABEL, FACTS, MARGIN, HEAD, FOOT = 176, 200, 28, 92, 56
DIGITS = COLUMNS * (CELL + GAP) - GAP
PANEL = DIGITS + 20 + FACTS


def write(results: Sequence[Result], target: Path) -> None:
    """Draw the sheet and write it as PNG."""
    images.save(few_colours(demo_sheet(results)), target, optimize=True)


def demo_sheet(results: Sequence[Result]) -> Any:
    """Return the figure as a PIL image. All results must have the same cases in the same order."""
    lines = len(results[0].cases)
    width = 2 * MARGIN + LABEL + len(results) * PANEL + (len(results) - 1) * MARGIN
    height = HEAD + lines * LINE + FOOT
    draw = _Sheet(width, height)
    for number, case in enumerate(results[0].cases):
        draw.label(case, HEAD + number * LINE)
    for place, result in enumerate(results):
        left = MARGIN + LABEL + place * (PANEL + MARGIN)
        draw.head(result, left)
        for number, case in enumerate(result.cases):
            draw.line(case, left, HEAD + number * LINE)
    draw.foot(results[0], height - FOOT)
    return draw.image


class _Sheet(Sheet):
    """Draws the parts of the sheet."""

    def head(self, result: Result, left: int) -> None:
        """Draw a panel's heading: the model, its size and the titles of the columns."""
        weights = f", {size(result.rows[0].bytes_bf16)} in bf16" if result.rows else ""
        self.text((left, 30), result.model, "title")
        self.text((left, 56), f"{_pipeline_class(result.model)}{weights}, {result.steps} steps", "small", SOFT)
        facts = left + DIGITS + 20
        self.text((facts, 56), "weights in memory", "small", SOFT)
        self.text((facts + FACTS, 56), "digits right", "small", SOFT, "rm")
        self.pen.line((left, 74, left + PANEL, 74), fill=RULE)

    def label(self, case: DemoRow | SkippedCase, top: int) -> None:
        """Draw a line's label: the scheme and its backend."""
        middle = top + CELL // 2
        self.text((MARGIN, middle - 10), case.label, "text")
        self.text((MARGIN, middle + 11), case.backend, "small", SOFT)

    def line(self, case: DemoRow | SkippedCase, left: int, top: int) -> None:
        """Draw the digits and numbers of a case, or the reason why it was skipped."""
        middle = top + CELL // 2
        if isinstance(case, SkippedCase):
            self.text((left, middle), f"skipped: {case.fix.partition('. Or use')[0]}", "small", SOFT)
            return
        for column, picture in enumerate(case.pictures[:COLUMNS]):
            self.digit(picture, left + column * (CELL + GAP), top, case.wanted[column] == case.seen[column])
        facts, share = left + DIGITS + 20, case.bytes / case.bytes_bf16
        self.text((facts, middle - 15), size(case.bytes), "text")
        self.text((facts + 68, middle - 15), f"{share:.0%}", "small", SOFT)
        self.text((facts + FACTS, middle - 15), f"{case.right} / {case.images}", "text", anchor="rm")
        self.bar(facts, middle + 1, FACTS, share)
        if case.psnr is not None:
            similarity = "same pixels" if case.psnr == float("inf") else f"PSNR {case.psnr:.1f} dB"
            self.text((facts + FACTS, middle + 19), similarity, "small", SOFT, "rm")

    def digit(self, picture: Any, left: int, top: int, right: bool) -> None:
        from PIL import Image

        self.image.paste(picture.convert("RGB").resize((CELL, CELL), Image.Resampling.BICUBIC), (left, top))
        if not right:
            self.pen.rectangle((left - 2, top - 2, left + CELL + 1, top + CELL + 1), outline=WRONG, width=3)

    def foot(self, result: Result, top: int) -> None:
        """Draw the legend: what the frames and bars mean, and the prompts used."""
        self.pen.rectangle((MARGIN, top + 22, MARGIN + 12, top + 34), outline=WRONG, width=3)
        self.text(
            (MARGIN + 22, top + 28),
            f"read as another digit by a classifier that is right on {result.judge:.1%} of real ones.     "
            "Bars: weights of the whole pipeline against bf16; the VAE is never quantized.     "
            "Prompts: \u201ca handwritten zero\u201d to \u201ca handwritten nine\u201d, the same noise in every line.",
            "small",
            SOFT,
        )


def _pipeline_class(model: str) -> str:
    import json

    name: str = json.loads((path(model) / "model_index.json").read_text())["_class_name"]
    return name

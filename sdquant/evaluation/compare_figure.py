"""A comparison as one picture: a column for each scheme with image, difference and numbers; columns wrap into lines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..planning.request import NOT_QUANTIZED
from ..utils.byte_sizes import size
from ..utils.figure import INK, RULE, SOFT, WRONG, Sheet

if TYPE_CHECKING:
    from .comparison import Comparison, ComparisonRow

COLUMNS = 5  # in a line at the most
LEAST, MOST = 256, 384  # pixels: a picture's longer side on the sheet
GAP, APART, MARGIN, HEAD, FOOT = 24, 44, 32, 100, 60  # GAP: from column to column; APART: from line to line
BETWEEN, CAPTION = 6, 112  # between picture and difference; the numbers below
PAD, READ = 12, 19  # pixels: around a reason, and from line to line of it


def sheet(comparison: Comparison, columns: int = COLUMNS) -> Any:
    """The comparison as a PIL image, with at most `columns` schemes in a line."""
    width, height = _shown(comparison.size)
    cell = max(width, LEAST)
    across = min(max(columns, 1), len(comparison.rows))
    lines = math.ceil(len(comparison.rows) / across)
    across = math.ceil(len(comparison.rows) / lines)  # lines of about the same length
    line = 2 * height + BETWEEN + CAPTION
    inner = max(across * (cell + GAP) - GAP, 2 * cell + GAP)  # so that there is room for the words
    canvas = _Sheet(2 * MARGIN + inner, HEAD + lines * (line + APART) - APART + FOOT)
    canvas.head(comparison, inner)
    for number, row in enumerate(comparison.rows):
        left = MARGIN + number % across * (cell + GAP)
        top = HEAD + number // across * (line + APART)
        canvas.column(comparison, row, left, top, (width, height), cell)
    canvas.foot(comparison, inner)
    return canvas.image


def _shown(size: tuple[int, int]) -> tuple[int, int]:
    """Return a picture's size on the sheet: small ones scaled by a whole number, large ones reduced."""
    longer = max(size)
    if longer <= MOST:
        times = max(1, LEAST // longer)
        return size[0] * times, size[1] * times
    return max(1, round(size[0] * MOST / longer)), max(1, round(size[1] * MOST / longer))


class _Sheet(Sheet):
    """Draws the parts of the sheet."""

    def head(self, comparison: Comparison, room: float) -> None:
        """Draw the heading: the prompt and the settings that all columns share."""
        width, height = comparison.size
        facts = [
            Path(comparison.model).name,
            f"{width}x{height}",
            f"{comparison.steps} steps",
            f"seed {comparison.seed}",
        ]
        facts += [f"guidance {comparison.guidance:g}"] if comparison.guidance is not None else []
        facts += [f"{name.replace('_', ' ')} {_value(value)}" for name, value in comparison.settings.items()]
        prompt = self.cut(f"\u201c{comparison.prompt}", "title", room - self.width_of("\u201d", "title"))
        self.text((MARGIN, 36), prompt + "\u201d", "title")
        self.text((MARGIN, 64), "   ".join(facts), "small", SOFT, room=room)
        self.pen.line((MARGIN, 82, MARGIN + room, 82), fill=RULE)

    def column(
        self, comparison: Comparison, row: ComparisonRow, left: int, top: int, size: tuple[int, int], cell: int
    ) -> None:
        """Draw the column of one scheme."""
        width, height = size
        below = top + height + BETWEEN
        if row.error is not None:
            self.reason(row.error, left, top, (cell, 2 * height + BETWEEN))
        else:
            self.picture(row.image, left, top, size)
            if row.difference is not None:
                self.picture(row.difference, left, below, size)
            else:
                self.box(left, below, size)
                self.text((left + width / 2, below + height / 2), "reference", "small", SOFT, "mm")
        self.caption(row, left, below + height, cell)

    def picture(self, image: Any, left: int, top: int, size: tuple[int, int]) -> None:
        from PIL import Image

        way = Image.Resampling.NEAREST if image.width <= size[0] else Image.Resampling.LANCZOS
        self.image.paste(image.convert("RGB").resize(size, way), (left, top))

    def box(self, left: int, top: int, size: tuple[int, int]) -> None:
        """Draw an empty frame in the place of a missing picture."""
        self.pen.rectangle((left, top, left + size[0] - 1, top + size[1] - 1), outline=RULE)

    def reason(self, text: str, left: int, top: int, size: tuple[int, int]) -> None:
        """Draw the reason why there is no picture, in its place."""
        width, height = size
        self.box(left, top, size)
        lines = self.wrapped(text, "small", width - 2 * PAD, max(1, (height - 2 * PAD) // READ))
        for number, line in enumerate(lines):
            self.text((left + PAD, top + PAD + READ // 2 + READ * number), line, "small", SOFT)

    def caption(self, row: ComparisonRow, left: int, top: int, room: int) -> None:
        """Draw the scheme's name and its numbers."""
        self.text((left, top + 24), "not quantized" if row.label == NOT_QUANTIZED else row.label, "text", room=room)
        if row.error is not None:
            self.text((left, top + 50), "no image", "small", WRONG)
        elif row.bytes is not None and row.bytes_bf16:
            share = row.bytes / row.bytes_bf16
            self.text((left, top + 50), size(row.bytes), "small")
            self.text((left + room, top + 50), f"{share:.0%} of bf16", "small", SOFT, "rm")
            self.bar(left, top + 62, room - 1, share)
            self.text((left, top + 86), _told(row), "small", INK)
            seconds = f"load {row.load_seconds:.1f} s, draw {row.draw_seconds:.1f} s"
            self.text((left, top + 106), seconds, "small", SOFT)

    def foot(self, comparison: Comparison, room: float) -> None:
        """Draw the legend: the meaning of the lower images, the device and the versions."""
        packages = [
            f"{name} {comparison.versions[name]}" for name in ("torch", "diffusers") if name in comparison.versions
        ]
        device = next(
            (row["name"] for row in comparison.machine["devices"] if row["torch_name"] == comparison.device),
            comparison.device,
        )
        below = self.image.height - 26
        legend = f"Below each image: its difference from the first, {comparison.amplify} times as bright."
        self.text((MARGIN, below), legend, "small", SOFT)
        rest = room - self.width_of(legend, "small") - GAP
        if rest > 100:
            where = self.cut(", ".join([device, *packages]), "small", rest)
            self.text((MARGIN + room, below), where, "small", SOFT, "rm")


def _told(row: ComparisonRow) -> str:
    """Describe how far the image is from the reference."""
    if row.psnr is None:
        return "the others are compared with this"
    if row.identical:
        return "the same pixels"
    return f"{row.psnr:.1f} dB, largest difference {row.largest} of 255"


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

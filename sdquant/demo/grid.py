"""The demo's picture: a row of digits for each scheme, with its name and size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .show import Result, Row

SCALE = 2  # a digit of 32 pixels is shown at 64
LABEL = 300
PAD = 6
COLUMNS = 10
INK, PAPER, SOFT = (20, 20, 24), (250, 250, 248), (110, 110, 120)


def write(results: Sequence[Result], target: Path) -> None:
    """Draw the grid and write it beside, then rename."""
    from PIL import Image, ImageDraw, ImageFont

    cell = results[0].rows[0].pictures[0].width * SCALE
    line = cell + PAD
    head = 44
    width = LABEL + COLUMNS * line + PAD
    height = sum(head + len(result.rows) * line for result in results) + PAD
    sheet = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    large, small = ImageFont.load_default(20), ImageFont.load_default(14)
    top = 0
    for result in results:
        pen.text((PAD * 2, top + 12), result.model, fill=INK, font=large)
        top += head
        for row in result.rows:
            _label(pen, row, top, cell, small)
            for column, picture in enumerate(row.pictures[:COLUMNS]):
                big = picture.resize((cell, cell), Image.Resampling.NEAREST)
                sheet.paste(big, (LABEL + column * line, top))
            top += line
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".sdquant-{target.name}.tmp")
    try:
        sheet.save(beside, format="PNG")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _label(pen: Any, row: Row, top: int, cell: int, font: Any) -> None:
    mega = row.bytes / 1e6
    share = row.bytes / row.bytes_bf16
    pen.text((PAD * 2, top + cell // 2 - 20), row.label, fill=INK, font=font)
    pen.text(
        (PAD * 2, top + cell // 2),
        f"{mega:.1f} MB, {share:.0%} of bf16, {row.right}/{row.images} right",
        fill=SOFT,
        font=font,
    )

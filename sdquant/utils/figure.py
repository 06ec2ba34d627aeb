"""Shared drawing code of the package's pictures: canvas, colours, fonts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

INK, SOFT, RULE, PAPER = (24, 26, 32), (112, 116, 126), (226, 227, 230), (252, 252, 250)
TRACK, BAR, WRONG = (228, 230, 235), (54, 112, 178), (205, 52, 48)
OWN = (INK, SOFT, RULE, PAPER, TRACK, BAR, WRONG)
SIZES: Mapping[str, int] = {"title": 22, "text": 16, "small": 13}  # pixels
ELLIPSIS = "\u2026"


class Sheet:
    """A picture that is drawn part by part.

    Attributes:
        image: the picture as a PIL image.
    """

    def __init__(self, width: int, height: int) -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (width, height), PAPER)
        self.pen = ImageDraw.Draw(self.image)

    @cached_property
    def fonts(self) -> dict[str, Any]:
        """Return Pillow's default font in each of `SIZES`."""
        from PIL import ImageFont

        return {name: ImageFont.load_default(size) for name, size in SIZES.items()}

    def text(
        self, xy: tuple[float, float], text: str, font: str, fill: Any = INK, anchor: str = "lm", room: float = 0
    ) -> None:
        """Draw a line of text. `room`: its maximum width in pixels, cut off at the end if longer; 0 for no limit."""
        self.pen.text(xy, self.cut(text, font, room) if room else text, fill=fill, font=self.fonts[font], anchor=anchor)

    def width_of(self, text: str, font: str) -> float:
        """Return the width of a line of text in pixels."""
        return float(self.fonts[font].getlength(text))

    def cut(self, text: str, font: str, room: float) -> str:
        """Return as much of the text as fits into `room` pixels."""
        if self.width_of(text, font) <= room:
            return text
        while text and self.width_of(text + ELLIPSIS, font) > room:
            text = text[:-1]
        return text.rstrip() + ELLIPSIS

    def wrapped(self, text: str, font: str, room: float, lines: int) -> list[str]:
        """Return the text in at most `lines` lines of at most `room` pixels; the rest is cut off."""
        rows: list[str] = []
        for word in text.split():
            if rows and self.width_of(f"{rows[-1]} {word}", font) <= room:
                rows[-1] += f" {word}"
            else:
                rows.append(word)
        if len(rows) > lines:
            rows[lines - 1 :] = [" ".join(rows[lines - 1 :])]
        return [self.cut(line, font, room) for line in rows]

    def bar(self, left: float, top: float, width: float, share: float) -> None:
        """Draw a bar, `share` of it filled."""
        self.pen.rounded_rectangle((left, top, left + width, top + 6), 3, fill=TRACK)
        self.pen.rounded_rectangle((left, top, left + width * min(share, 1), top + 6), 3, fill=BAR)


def few_colours(image: Any) -> Any:
    """Return a palette image of greys and the sheets' own colours: photographs become grey.

    It takes a third of the bytes and looks the same.
    """
    from PIL import Image

    greys = [(level, level, level) for level in range(0, 256, 3)]
    edges = [tuple((a * k + b * (4 - k)) // 4 for a, b in zip(BAR, TRACK, strict=True)) for k in (1, 2, 3)]
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for colour in (*OWN, *edges, *greys) for value in colour])
    return image.quantize(palette=palette, dither=Image.Dither.NONE)

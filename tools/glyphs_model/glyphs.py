"""The data, the prompts and the judge of glyphs-flux: characters of the DejaVu fonts, which come with matplotlib.

An image is one character in one of two weights and two families, in one of eight colours on another of them: 7616
things to ask for. Its place, size, angle and colours waver a little, from seeds that the judge's training, its test and
the model's training do not share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

SIZE = 16  # pixels a side
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ23456789"  # 0 and 1 look like O and I
COLOURS = {
    "black": (15, 15, 15),
    "white": (240, 240, 240),
    "red": (225, 25, 25),
    "green": (20, 160, 40),
    "blue": (25, 45, 225),
    "yellow": (245, 230, 30),
    "cyan": (40, 225, 235),
    "magenta": (230, 35, 220),
}
STYLES = {(False, False): "plain", (True, False): "bold", (False, True): "serif", (True, True): "bold serif"}
FONTS = {(False, False): "DejaVuSans", (True, False): "DejaVuSans-Bold",
         (False, True): "DejaVuSerif", (True, True): "DejaVuSerif-Bold"}  # fmt: skip
MODEL_SEED, JUDGE_SEED, TEST_SEED = 1, 2, 3
_FINE = 4  # masks are drawn so many times as large


@dataclass(frozen=True, kw_only=True)
class Glyph:
    """What an image shows; `colour` and `ground` are two of `COLOURS`."""

    character: str
    bold: bool
    serif: bool
    colour: str
    ground: str

    @property
    def prompt(self) -> str:
        """Return the text that asks for it."""
        return f"{self.colour} {STYLES[self.bold, self.serif]} {self.character} on {self.ground}"


def shapes() -> list[Glyph]:
    """Return every shape, in black on white."""
    return [
        Glyph(character=character, bold=bold, serif=serif, colour="black", ground="white")
        for character in CHARACTERS
        for bold, serif in FONTS
    ]


def samples(count: int, seed: int = 0) -> list[Glyph]:
    """Return `count` glyphs to ask for, the characters in turn and the rest at random; the same for the same seed."""
    import numpy as np

    random = np.random.default_rng(seed)
    glyphs = []
    for number in range(count):
        colour, ground = (str(name) for name in random.choice(list(COLOURS), 2, replace=False))
        bold, serif = (bool(value) for value in random.integers(2, size=2))
        character = CHARACTERS[number % len(CHARACTERS)]
        glyphs.append(Glyph(character=character, bold=bold, serif=serif, colour=colour, ground=ground))
    return glyphs


def masks(glyphs: Iterable[Glyph], seed: int) -> npt.NDArray[np.float32]:
    """Draw shapes with a wavering place, size and angle: coverage [n, 16, 16] in 0..1."""
    import numpy as np

    random = np.random.default_rng(seed)
    return np.stack([_mask(glyph, random) for glyph in glyphs])


@lru_cache(maxsize=64)
def _font(name: str, size: int) -> Any:
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"), size)


def _mask(glyph: Glyph, random: np.random.Generator) -> npt.NDArray[np.float32]:
    import numpy as np
    from PIL import Image, ImageDraw

    side = SIZE * _FINE
    font = _font(FONTS[glyph.bold, glyph.serif], int(random.integers(52, 55)))
    x, y = side / 2 + _FINE * random.uniform(-0.5, 0.5, 2)
    canvas = Image.new("L", (side, side))
    ImageDraw.Draw(canvas).text((x, y), glyph.character, fill=255, font=font, anchor="mm")
    angle = random.uniform(-2, 2)
    fine = np.asarray(canvas.rotate(angle, Image.Resampling.BILINEAR), np.float32) / 255
    return fine.reshape(SIZE, _FINE, SIZE, _FINE).mean(axis=(1, 3))


def paint(
    coverage: npt.NDArray[np.float32], colours: npt.NDArray[Any], grounds: npt.NDArray[Any], random: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Colour masks [n, 16, 16] by the numbers [n] of their colours, which waver: [n, 3, 16, 16] in 0..1."""
    import numpy as np

    table = np.array(list(COLOURS.values()), np.float32) / 255
    waver = random.uniform(-0.04, 0.04, (2, len(coverage), 3)).astype(np.float32)
    front, back = np.clip(table[colours] + waver[0], 0, 1), np.clip(table[grounds] + waver[1], 0, 1)
    share = coverage[:, None]
    image: npt.NDArray[np.float32] = share * front[:, :, None, None] + (1 - share) * back[:, :, None, None]
    return image


def images(glyphs: Sequence[Glyph], seed: int) -> list[Any]:
    """Draw glyphs as the model is to draw them: PIL images."""
    import numpy as np
    from PIL import Image

    names = list(COLOURS)
    pixels = paint(
        masks(glyphs, seed),
        np.array([names.index(glyph.colour) for glyph in glyphs]),
        np.array([names.index(glyph.ground) for glyph in glyphs]),
        np.random.default_rng(seed),
    )
    return [Image.fromarray((one.transpose(1, 2, 0) * 255).round().astype(np.uint8)) for one in pixels]


def _read_colours(picture: Any) -> tuple[str, str, npt.NDArray[Any]]:
    """Return an image's colour, ground and mask: the border's median is the ground, what is farthest off the glyph."""
    import numpy as np

    values = np.asarray(picture.convert("RGB"), np.float64)
    border = np.concatenate([values[0], values[-1], values[:, 0], values[:, -1]])
    back = np.median(border, axis=0)
    off = np.linalg.norm(values - back, axis=2)
    front = np.median(values[off >= 0.75 * np.quantile(off, 0.97)], axis=0)
    line = front - back
    share = ((values - back) @ line / max(float(line @ line), 1.0)).clip(0, 1)
    return _nearest(front), _nearest(back), share


def _nearest(colour: npt.NDArray[Any]) -> str:
    return min(COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(COLOURS[name], colour, strict=True)))


class GlyphJudge:
    """Read an image: colours by their distance, the shape by a support-vector classifier of drawn characters.

    Attributes:
        accuracy: share of drawn images that it reads right in every respect, of seeds that it was not trained on.
    """

    def __init__(self, each: int = 16, held_back: int = 1020) -> None:
        from sklearn.svm import SVC

        examples = [
            replace(shape, colour=one.colour, ground=one.ground)
            for shape, one in zip(shapes() * each, samples(len(shapes()) * each), strict=True)
        ]
        features = _features([_read_colours(image)[2] for image in images(examples, JUDGE_SEED)])
        self._classifier = SVC(gamma="scale", C=10)
        self._classifier.fit(features, list(range(len(shapes()))) * each)
        glyphs = samples(held_back, TEST_SEED)
        readings = self.read(images(glyphs, TEST_SEED))
        self.accuracy = sum(a == b for a, b in zip(readings, glyphs, strict=True)) / held_back

    def read(self, pictures: Sequence[Any]) -> list[Glyph]:
        """Return what each PIL image of 16x16 pixels shows."""
        if not pictures:
            return []
        parts = [_read_colours(picture) for picture in pictures]
        numbers = self._classifier.predict(_features([mask for *_, mask in parts]))
        return [
            replace(shapes()[number], colour=colour, ground=ground)
            for number, (colour, ground, _) in zip(numbers, parts, strict=True)
        ]


def _features(masks: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Stack masks [16, 16], each moved to its centre of mass, so that a place does not matter: [n, 256]."""
    import numpy as np
    from numpy import fft

    grid, wave = np.arange(SIZE), fft.fftfreq(SIZE)
    rows = []
    for one in masks:
        total = one.sum() + 1e-6
        y, x = (float((one.sum(axis) * grid).sum() / total) - SIZE / 2 for axis in (1, 0))
        turn = np.exp(2j * np.pi * (y * wave[:, None] + x * wave[None, :]))
        rows.append(fft.ifft2(fft.fft2(one) * turn).real.ravel())
    return np.stack(rows)


@lru_cache(maxsize=1)
def judge() -> GlyphJudge:
    """Return the judge, trained once a process."""
    return GlyphJudge()

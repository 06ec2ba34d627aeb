"""Pictures of all kinds are opened as people see them, and what is none is refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from sdquant.errors import BadFileError
from sdquant.utils.picture_files import as_seen, open_picture

RED, BLUE = (255, 0, 0), (0, 0, 255)


def _picture() -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", (64, 32), RED)
    image.paste(BLUE, (32, 0, 64, 32))
    return image


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    return exif


@pytest.mark.parametrize(
    ("name", "mode", "how"),
    [
        ("a.jpg", "CMYK", {"quality": 95}),
        ("a.png", "P", {}),
        ("a.tiff", "RGB", {}),
        ("a.gif", "P", {"save_all": True, "append_images": [Image.new("P", (64, 32))]}),
        ("a.webp", "RGB", {"save_all": True, "append_images": [Image.new("RGB", (64, 32))], "lossless": True}),
        ("a.png", "RGB", {"icc_profile": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()}),
        ("a.png", "RGB", {"icc_profile": b"no profile"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kinds(tmp_path: Path, name: str, mode: str, how: dict[str, Any]) -> None:
    source = _picture().quantize(2) if mode == "P" else _picture().convert(mode)
    source.save(tmp_path / name, **how)
    image = open_picture(tmp_path / name, "Cannot")
    assert (image.mode, image.size) == ("RGB", (64, 32))
    assert np.abs(np.array(image, int) - np.array(_picture(), int)).max() <= 12


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_photos_are_upright(tmp_path: Path, suffix: str) -> None:
    _picture().save(tmp_path / f"a.{suffix}", exif=_turned(), quality=95)
    image = open_picture(tmp_path / f"a.{suffix}", "Cannot")
    assert image.size == (32, 64)
    assert image.getpixel((16, 8))[0] > 200 and image.getpixel((16, 56))[2] > 200


def test_deep_and_transparent(tmp_path: Path) -> None:
    steps = np.linspace(0, 65535, 64 * 32).reshape(32, 64)
    Image.fromarray(steps.astype(np.uint16)).save(tmp_path / "deep.png")
    grey = np.array(open_picture(tmp_path / "deep.png", "Cannot"))[..., 0]
    assert np.abs(grey - steps / 257).max() <= 1  # Pillow alone cuts all of it at 255
    assert np.array(as_seen(Image.fromarray((steps / 65535).astype(np.float32))))[-1, -1, 0] == 255
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert as_seen(clear).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"no picture", "no picture"), (b"", "no picture"), (b"%!PS-Adobe-3.0 EPSF-3.0", "no picture"), (None, "damaged")],
)
def test_what_is_none(tmp_path: Path, content: bytes | None, why: str) -> None:
    Image.effect_noise((64, 64), 50).save(tmp_path / "cut.png")
    whole = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(BadFileError, match=why) as error:
        open_picture(tmp_path / "cut.png", "Cannot start from cut.png")
    assert "PNG, JPEG or WebP" in error.value.fix
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    with pytest.raises(BadFileError, match="100 million pixels"):
        open_picture(tmp_path / "bomb.png", "Cannot")

"""Opens a picture of any usual kind as people see it: upright, its first frame, in 8-bit sRGB, on white."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ..errors import BadFileError

MOST_PIXELS = 100_000_000
# What cameras, phones and web pages write. Pillow knows others, some of which start programs (EPS).
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "JPEG2000")
_FIX = "Use a PNG, JPEG or WebP file"


def open_picture(path: str | Path, what: str) -> Any:
    """Read a picture as a PIL image in RGB.

    Args:
        what: what cannot be done if it is none, for the error.

    Raises:
        BadFileError: it is no picture, too large, or damaged.
    """
    from PIL import Image, UnidentifiedImageError

    Image.init()
    try:
        with Image.open(path, formats=[name for name in _FORMATS if name in Image.OPEN]) as file:
            if file.width * file.height > MOST_PIXELS:
                raise Image.DecompressionBombError
            return as_seen(file)
    except UnidentifiedImageError as error:
        raise BadFileError(what, "it is no picture, or of a kind that cannot be opened", _FIX) from error
    except Image.DecompressionBombError as error:
        raise BadFileError(
            what, f"it has more than {MOST_PIXELS // 1_000_000} million pixels", "Use a smaller one"
        ) from error
    except (OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
        raise BadFileError(what, "the file is damaged, or not complete", _FIX) from error


def as_seen(image: Any) -> Any:
    """Return a PIL image as viewers show it, in RGB: turned as its EXIF says, with its colour profile, on white."""
    from PIL import Image, ImageOps

    image = _in_srgb(_in_8_bits(ImageOps.exif_transpose(image)))
    if not image.has_transparency_data:
        return image.convert("RGB")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")


def _in_8_bits(image: Any) -> Any:
    """Return an image of integers or floats in grey, which Pillow would cut at 255, scaled to 8 bits."""
    import numpy as np
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    values = np.nan_to_num(np.asarray(image).astype(np.float32))
    most = float(values.max(initial=0))
    tops = (1.0, 255.0) if image.mode == "F" else (255.0, 65535.0) if image.mode == "I" else (65535.0,)
    top = next((top for top in tops if most <= top), most)
    return Image.fromarray((values * (255 / top) + 0.5).clip(0, 255).astype(np.uint8))


def _in_srgb(image: Any) -> Any:
    """Return an image with its colour profile applied; as it is without one, or with one that cannot be used."""
    from PIL import ImageCms

    profile = image.info.get("icc_profile")
    if not profile or image.mode not in ("RGB", "RGBA", "CMYK", "L"):
        return image
    out = "RGBA" if image.mode == "RGBA" else "RGB"
    try:
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        converted = ImageCms.profileToProfile(image, own, ImageCms.createProfile("sRGB"), outputMode=out)
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image
    return converted if converted is not None else image

"""PIL images: the difference of two, and writing one to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .metrics import decibels

# Endings of image files that are written.
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def psnr(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Return the peak signal-to-noise ratio of two lists of images, in dB, over all their pixels; infinite if equal."""
    import numpy as np

    a, b = (np.stack([_levels(image) for image in images]) for images in (one, other))
    return decibels(255**2, float(((a - b) ** 2).mean()))


def largest_difference(one: Any, other: Any) -> int:
    """Return the largest difference of two images over all channels of all pixels, 0 to 255."""
    import numpy as np

    return int(np.abs(_levels(one) - _levels(other)).max())


def difference(one: Any, other: Any, amplify: int) -> Any:
    """Return an image of the absolute difference of two, `amplify` times as bright; black where they are equal."""
    import numpy as np
    from PIL import Image

    apart = np.abs(_levels(one) - _levels(other)) * amplify
    return Image.fromarray(np.minimum(apart, 255).astype(np.uint8))


def save(image: Any, path: Path, *, optimize: bool = False) -> None:
    """Write an image whole or not at all, in the format of the path's ending; its folder is made.

    Args:
        optimize: take longer for a smaller file.

    Raises:
        DiskSpaceError, ConflictError, SettingsError: as `atomic_write.whole_file`.
    """
    from PIL import Image

    from .atomic_write import whole_file

    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        image.save(file, format=Image.registered_extensions()[path.suffix.lower()], optimize=optimize)


def _levels(image: Any) -> Any:
    """Return the pixels, float64 [height, width, 3], 0 to 255."""
    import numpy as np

    return np.asarray(image.convert("RGB"), dtype=np.float64)

"""Pipelines that start from an image: image to image and inpainting, from a loaded one with the same components."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from . import libraries

_AUTO = "diffusers.pipelines.auto_pipeline"
_TABLES = ("AUTO_TEXT2IMAGE_PIPELINES_MAPPING", "AUTO_IMAGE2IMAGE_PIPELINES_MAPPING", "AUTO_INPAINT_PIPELINES_MAPPING")
_FEATHER = 64  # the soft edge of what is painted anew, as a share of the shorter side


@dataclass(frozen=True, kw_only=True)
class StartImage:
    """An image to start from.

    Attributes:
        image: PIL image. strength: how much of it is drawn anew, above 0 up to 1.
        mask: PIL image of the same size, white where it is to be drawn anew; None for everywhere.
    """

    image: Any
    strength: float = 0.6
    mask: Any = None

    def sized(self, size: tuple[int, int]) -> StartImage:
        """Return it in another size, cut at the longer side."""
        from PIL import Image, ImageOps

        from ..utils.picture_files import as_seen

        mask = self.mask
        if mask is not None:
            mask = ImageOps.fit(ImageOps.exif_transpose(mask).convert("L"), size, Image.Resampling.NEAREST)
        image = ImageOps.fit(as_seen(self.image), size, Image.Resampling.LANCZOS)
        return StartImage(image=image, strength=self.strength, mask=mask)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a pipeline's call."""
        values = {"image": self.image, "strength": self.strength}
        return values if self.mask is None else {**values, "mask_image": self.mask}

    def outside_kept(self, drawn: Any) -> Any:
        """Return a drawn image with the start image where nothing was painted: the VAE changes it a little."""
        from PIL import Image, ImageChops, ImageFilter

        if self.mask is None or drawn.size != self.image.size:
            return drawn
        soft = self.mask.filter(ImageFilter.GaussianBlur(min(drawn.size) / _FEATHER))
        return Image.composite(drawn, self.image, ImageChops.darker(soft, self.mask))


def takes_image(kind: str) -> bool:
    """Return whether a pipeline class has one beside it that starts from an image, by the names of diffusers' classes.

    Its tables of them (`image_classes`) import every pipeline that there is, which takes seconds.
    """
    stem = kind.removesuffix("Pipeline")
    return not stem.endswith("ControlNet") and f"{stem}Img2ImgPipeline" in _names()


@cache
def _names() -> frozenset[str]:
    """Return the names of diffusers, from the text of its `__init__`: to import it takes seconds, and torch."""
    found = find_spec("diffusers")
    if found is not None and found.origin is not None and "diffusers" not in sys.modules:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return frozenset(re.findall(r'"(\w+Pipeline)"', Path(found.origin).read_text(encoding="utf-8")))
    return frozenset(dir(libraries.diffusers()))


def image_classes(kind: str) -> tuple[type | None, type | None]:
    """Return the classes for image to image and for inpainting that take the components of a pipeline class."""
    tables: list[Mapping[str, type]] = [getattr(libraries.module(_AUTO), name) for name in _TABLES]
    families = [family for table in tables for family, one in table.items() if one.__name__ == kind]
    if not families:
        return None, None
    return tables[1].get(families[0]), tables[2].get(families[0])


def pipeline_for(pipe: Any, start: StartImage | None) -> Any:
    """Return a pipeline with the same components that takes a start image; the pipeline itself for None.

    Raises:
        SettingsError: diffusers has no such class for this pipeline.
    """
    if start is None:
        return pipe
    name = type(pipe).__name__
    image, inpaint = image_classes(name)
    what = "Cannot start from an image" if start.mask is None else "Cannot draw a part of an image"
    if (image if start.mask is None else inpaint) is None:
        raise SettingsError(what, f"diffusers has no such pipeline beside {name}", "Remove the start image or its mask")
    auto = "AutoPipelineForImage2Image" if start.mask is None else "AutoPipelineForInpainting"
    return getattr(libraries.diffusers(), auto).from_pipe(pipe)


def size_for(pipe: Any, start: StartImage, side: int, width: int | None, height: int | None) -> tuple[int, int]:
    """Return the size to draw in: what is asked for, or the image's shape with as many pixels as `side` squared."""
    if width and height:
        return width, height
    multiple = 2 * int(getattr(pipe, "vae_scale_factor", 8))
    shape = (start.image.width / start.image.height) ** 0.5
    sides = (max(multiple, round(length / multiple) * multiple) for length in (side * shape, side / shape))
    own = tuple(sides)
    return width or own[0], height or own[1]


def refuse_steps(start: StartImage, steps: int) -> None:
    """Raise SettingsError if nothing would be drawn: a strength takes that share of the steps."""
    if not 0 < start.strength <= 1 or int(steps * start.strength) < 1:
        raise SettingsError(
            f"Cannot start from an image with strength {start.strength:g} and {steps} steps",
            "that leaves no step to draw",
            "Use more steps, or more strength, up to 1",
        )

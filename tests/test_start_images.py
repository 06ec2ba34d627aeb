"""Image to image and inpainting with the components of a loaded pipeline, in every offload mode."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops, ImageDraw, ImageStat

import sdquant
from sdquant.errors import SettingsError
from sdquant.models import StartImage, draw, pipeline_for, traits
from sdquant.models.start_images import image_classes, size_for, takes_image


def drawn(pipe: Any, start: StartImage | None, seeds: tuple[int, ...] = (1,)) -> list[Image.Image]:
    return draw(pipeline_for(pipe, start), ["a handwritten seven"] * len(seeds), seeds=seeds, steps=6, start=start)


def far(one: Image.Image, other: Image.Image) -> float:
    return ImageStat.Stat(ImageChops.difference(one.convert("L"), other.convert("L"))).mean[0]


@pytest.mark.parametrize(
    ("model", "scheme", "offload"),
    [
        ("digits-sd", "nf4", "balanced"),
        ("digits-flux", "int8", "sequential"),
        *(
            pytest.param(model, scheme, offload, marks=pytest.mark.slow)
            for model in ("digits-sd", "digits-flux")
            for scheme in (None, "int8")
            for offload in ("none", "model", "group", "sequential", "balanced")
        ),
    ],
)
def test_an_image_and_a_part_of_it(model: str, scheme: str | None, offload: str) -> None:
    runtime = "plain" if scheme == "nf4" else None
    pipe = sdquant.load_model(sdquant.demo.path(model), scheme, offload, runtime=runtime, progress=False)
    before = drawn(pipe, None)[0]
    start = drawn(pipe, None, (2,))[0]
    near, away = (drawn(pipe, StartImage(image=start, strength=by))[0] for by in (0.2, 1.0))
    assert far(near, start) < far(away, start)
    mask = Image.new("L", start.size, 0)
    half = start.width // 2
    ImageDraw.Draw(mask).rectangle((0, 0, half - 1, start.height), fill=255)
    both = drawn(pipe, StartImage(image=start, strength=1.0, mask=mask), (1, 3))
    for part in both:
        box = (half, 0, start.width, start.height)
        assert part.crop(box).tobytes() == start.convert("RGB").crop(box).tobytes()
        assert part.tobytes() != start.tobytes()
    assert both[0].tobytes() != both[1].tobytes()
    assert drawn(pipe, None)[0].tobytes() == before.tobytes()


def test_transparent_parts_are_white() -> None:
    start = StartImage(image=Image.new("RGBA", (32, 16), (0, 0, 0, 0)))
    assert start.sized((16, 8)).image.getextrema() == ((255, 255),) * 3


def test_sizes_and_what_is_refused(tmp_path: Path) -> None:
    pipe = sdquant.load_model(sdquant.demo.path("digits-sd"), progress=False)
    wide = StartImage(image=Image.new("RGB", (400, 100)), strength=0.5)
    side = sdquant.models.native_size(pipe)
    width, height = size_for(pipe, wide, side, None, None)
    assert width > 2 * height and width % pipe.vae_scale_factor == 0
    assert size_for(pipe, wide, side, 64, 32) == (64, 32)
    assert drawn(pipe, wide)[0].size == (width, height)
    with pytest.raises(SettingsError, match="leaves no step"):
        drawn(pipe, StartImage(image=wide.image, strength=0.1))
    assert image_classes("NoPipeline") == (None, None)
    assert traits(sdquant.demo.path("digits-flux")).image and not traits(tmp_path).image


def test_the_page_finds_it_by_names_alone() -> None:
    assert takes_image("FluxPipeline") and takes_image("StableDiffusionXLPipeline")
    assert not takes_image("StableDiffusion3ControlNetPipeline") and not takes_image("DDPMPipeline")
    for name in ("FluxPipeline", "StableDiffusionPipeline", "StableDiffusion3Pipeline", "WanPipeline"):
        assert takes_image(name) == (image_classes(name)[0] is not None)


def test_a_mask_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side: the left column of the file is the top row of what is seen
    raw = Image.new("L", (8, 16), 0)
    raw.paste(255, (0, 0, 4, 16))
    file = io.BytesIO()
    raw.save(file, "PNG", exif=exif)
    mask = Image.open(io.BytesIO(file.getvalue()))
    start = StartImage(image=Image.new("RGB", (16, 8)), mask=mask).sized((16, 8))
    assert start.mask.getbbox() == (0, 0, 16, 4)

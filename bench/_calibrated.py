"""What calibration finds of the small models, and mixes of a share of their bytes, for whatever measures them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sdquant
from bench._pictures import path, prompt, wanted
from sdquant.rules import statistics_file
from sdquant.training.calibration import Calibration, calibrate

COMPONENTS = {"digits-flux": "transformer", "digits-sd": "unet", "glyphs-flux": "transformer"}
ENCODERS = {
    "digits-flux": ("text_encoder", "text_encoder_2"), "digits-sd": ("text_encoder",),
    "glyphs-flux": ("text_encoder", "text_encoder_2"),
}  # fmt: skip
STEPS, IMAGES = 6, 20
AUTO, MEASURED = "auto, {share}", "auto, {share}, statistics"


def quantized_components(name: str) -> tuple[str, ...]:
    """Return the UNet or transformer and the text encoders, which are quantized by default."""
    return (COMPONENTS[name], *ENCODERS[name])


def task(name: str) -> Calibration:
    """Return a calibration of twenty prompts and seeds, each digit twice or glyphs, of all that is quantized."""
    prompts = tuple(prompt(thing, number // 10) for number, thing in enumerate(wanted(name, IMAGES)))
    return Calibration(
        model=name, rules=(), prompts=prompts, steps=STEPS, components=quantized_components(name), seed=0
    )


def write_statistics(name: str, target: Path) -> Path:
    """Calibrate a model, and return the file that was written."""
    found = calibrate(sdquant.load_model(path(name), progress=False), task(name))
    statistics_file.write_statistics(target, found, {})
    return target


def is_mix(scheme: str) -> bool:
    """Return whether a name is one of a mix, as AUTO and MEASURED."""
    return scheme.startswith(AUTO.partition("{")[0])


def load_mix(name: str, scheme: str, stats: Path, weights: int, components: tuple[str, ...]) -> Any:
    """Return a model with `quant="auto"` and a size of so large a share of bf16.

    Args:
        scheme: as AUTO or MEASURED. weights: the number of those in the layers of the components that are quantized,
            which the share is of.
    """
    share = float(scheme.split(",")[1])
    return sdquant.load_model(
        path(name), quant="auto", size=int(sdquant.plan(path(name)).bytes - 2 * (1 - share) * weights),
        quant_stats=stats if scheme == MEASURED.format(share=f"{share:g}") else None,
        components=list(components), progress=False,
    )  # fmt: skip

"""The settings of generated pictures: written into them, and taken from one that was dropped into the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import html_components, infotext

if TYPE_CHECKING:
    from ..app_state import Desk
    from ..model_manager import GeneratedImage


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of the widgets; a value outside of them is not taken. `own`: the sampler that is none."""

    prompt: int
    steps: int
    seed: int
    side: int
    guidance: float
    own: str


def with_settings(desk: Desk, result: GeneratedImage) -> list[tuple[Any, str]]:
    """Write the settings of each image into it; return the images with their captions."""
    drawing, plan = result.drawing, result.held.plan
    words = html_components.scheme_words(plan)
    prompt = infotext.with_loras(drawing.prompt, [(one.path.stem, one.strength) for one in drawing.loras])
    for image, seed in zip(result.images, drawing.seeds, strict=True):
        values = {
            "Steps": drawing.steps,
            "Sampler": drawing.sampler,
            "CFG scale": drawing.guidance,
            "Seed": seed,
            "Denoising strength": drawing.start.strength if drawing.start is not None else None,
            "Size": f"{image.width}x{image.height}",
            "Model": desk.roots.shown(plan.path),
            "Quantization": words,
            "Version": "sdquant",
        }
        image.info[infotext.KEY] = infotext.write(prompt, drawing.negative, values)
    return [
        (image, f"seed {seed}, {drawing.steps} steps, {words}")
        for image, seed in zip(result.images, drawing.seeds, strict=True)
    ]


def widget_values(settings: dict[str, str], samplers: Sequence[str], limits: Limits, skip: Any) -> tuple[Any, ...]:
    """Return prompt, negative prompt, steps, seed, width, height, guidance, sampler and batch size of a picture.

    Args:
        samplers: those that the model at hand has. skip: stands for a value that is not taken.
    """
    sides = settings.get("Size", "").partition("x")
    sampler = settings.get("Sampler") or limits.own
    return (
        settings["Prompt"][: limits.prompt] or skip,
        settings["Negative prompt"][: limits.prompt],
        _number(settings.get("Steps"), int, 1, limits.steps, skip),
        _number(settings.get("Seed"), int, 0, limits.seed, skip),
        _number(sides[0], int, 0, limits.side, skip),
        _number(sides[2], int, 0, limits.side, skip),
        _number(settings.get("CFG scale"), float, 0, limits.guidance, skip) if "CFG scale" in settings else -1,
        sampler if sampler in samplers else limits.own,
        1,
    )


def denoising(settings: dict[str, str], skip: Any) -> Any:
    """Return the strength of a picture that was started from another."""
    return _number(settings.get("Denoising strength"), float, 0.01, 1, skip)


def _number(text: str | None, kind: type, least: float, most: float, skip: Any) -> Any:
    try:
        value = kind(text or "")
    except ValueError:
        return skip
    return value if least <= value <= most else skip

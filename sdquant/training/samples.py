"""Sample sheets: images that the model generates during training, each with its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..utils import figure
from .latent_cache import helpers_on

CELL, GAP, LABEL, COLUMNS = 128, 16, 52, 6  # pixels, and pictures side by side


def sample_sheet(pictures: Sequence[Any], prompts: Sequence[str], title: str, under: str) -> Any:
    """Arrange the pictures in rows as one PIL image."""
    columns = max(min(COLUMNS, len(pictures)), 3)
    rows = -(-len(pictures) // columns)
    drawn, places = figure.grid([CELL] * columns, [CELL] * rows, title, [under], gap=(GAP, LABEL))
    for axes, picture, prompt in zip(places, pictures, prompts, strict=False):
        scale = CELL / max(picture.size)
        figure.show(axes, picture, 0, 0, (round(picture.width * scale), round(picture.height * scale)))
        axes.set_xlabel(figure.fit(prompt or "(empty prompt)", CELL, 2), loc="left", color=figure.SOFT)
    return figure.rendered(drawn)


def draw(pipe: Any, net: Any, prompts: Sequence[str], *, steps: int, seed: int, device: Any) -> list[Any]:
    """Generate a PIL image for each prompt, with `net` temporarily in the pipeline."""
    from ..core import MAIN
    from ..models import draw as draw_with

    name = next(name for name in MAIN if name in pipe.components)
    before, training = pipe.components[name], net.training
    setattr(pipe, name, net.eval())
    try:
        with helpers_on(pipe, device):
            return draw_with(pipe, prompts, seeds=range(seed, seed + len(prompts)), steps=steps)
    finally:
        setattr(pipe, name, before)
        net.train(training)

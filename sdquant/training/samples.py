"""Sample sheets: images that the model generates during training, each with its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..utils.figure import SOFT, Sheet

CELL, GAP, MARGIN, HEAD, LABEL, COLUMNS = 128, 16, 28, 76, 42, 6  # pixels, and pictures side by side


def sample_sheet(pictures: Sequence[Any], prompts: Sequence[str], title: str, under: str) -> Any:
    """Arrange the pictures in rows as one PIL image."""
    from PIL import Image

    columns = max(min(COLUMNS, len(pictures)), 3)
    rows = -(-len(pictures) // columns)
    width = 2 * MARGIN + columns * (CELL + GAP) - GAP
    canvas = Sheet(width, HEAD + rows * (CELL + LABEL + GAP) + MARGIN - GAP)
    canvas.text((MARGIN, 28), title, "title", room=width - 2 * MARGIN)
    canvas.text((MARGIN, 54), under, "small", SOFT, room=width - 2 * MARGIN)
    for number, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
        left = MARGIN + number % columns * (CELL + GAP)
        top = HEAD + number // columns * (CELL + LABEL + GAP)
        small = picture.convert("RGB")
        small.thumbnail((CELL, CELL))
        if max(small.size) < CELL:
            scale = CELL / max(small.size)
            small = small.resize((round(small.width * scale), round(small.height * scale)), Image.Resampling.BICUBIC)
        canvas.image.paste(small, (left, top))
        for line, text in enumerate(canvas.wrapped(prompt or "(empty prompt)", "small", CELL, 2)):
            canvas.text((left, top + CELL + 13 + 16 * line), text, "small", SOFT)
    return canvas.image


def draw(pipe: Any, net: Any, prompts: Sequence[str], *, steps: int, seed: int, device: Any) -> list[Any]:
    """Generate a PIL image for each prompt, with `net` temporarily in the pipeline."""
    from ..core.choices import MAIN
    from ..models.generate import draw as draw_with

    name = next(name for name in MAIN if name in pipe.components)
    before, training = pipe.components[name], net.training
    setattr(pipe, name, net.eval())
    helpers = [part for part in pipe.components.values() if hasattr(part, "to") and part is not net]
    for part in helpers:
        part.to(device)
    try:
        return draw_with(pipe, prompts, seeds=range(seed, seed + len(prompts)), steps=steps)
    finally:
        for part in helpers:
            part.to("cpu")
        setattr(pipe, name, before)
        net.train(training)

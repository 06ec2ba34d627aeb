"""Where the small models are, what each is asked for, and how many of its pictures show that.

glyphs-flux does not come with sdquant: `python -m tools.glyphs_model.train` makes it, in train-work/.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sdquant import demo, models
from sdquant.training import digits
from tools.glyphs_model import FOLDER, glyphs

MODELS = (*demo.MODELS, "glyphs-flux")
TOKENS = 16


def path(model: str) -> Path:
    """Return the folder of a model."""
    return FOLDER if model == "glyphs-flux" else demo.path(model)


def wanted(model: str, count: int, seed: int = 0) -> list[Any]:
    """Return what `count` pictures are to show: the ten digits in turn, or glyphs that the seed chooses."""
    return list(glyphs.samples(count, seed)) if model == "glyphs-flux" else [number % 10 for number in range(count)]


def prompt(thing: Any, template: int = 0) -> str:
    """Return the text that asks for one of `wanted`; a digit has several."""
    return thing.prompt if isinstance(thing, glyphs.Glyph) else digits.prompt(thing, template)


def draw(model: str, pipe: Any, things: Sequence[Any], seeds: Sequence[int], steps: int, batch: int = 50) -> list[Any]:
    """Draw a picture of each thing. Glyphs take 16 text tokens, not 512, which only cost time: prompts have seven."""
    if model != "glyphs-flux":
        return models.draw(pipe, [prompt(thing) for thing in things], seeds=seeds, steps=steps, batch=batch)
    pictures: list[Any] = []
    pipe.set_progress_bar_config(disable=True)
    for start in range(0, len(things), batch):
        part = slice(start, start + batch)
        pictures += pipe(
            prompt=[thing.prompt for thing in things[part]], height=glyphs.SIZE, width=glyphs.SIZE,
            num_inference_steps=steps, max_sequence_length=TOKENS,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds[part]],
        ).images  # fmt: skip
    return pictures


def judge(model: str) -> glyphs.GlyphJudge | digits.Judge:
    """Return what reads the pictures."""
    return glyphs.judge() if model == "glyphs-flux" else digits.judge()


def right(model: str, things: Sequence[Any], pictures: Sequence[Any]) -> int:
    """Return how many pictures are read as what was asked for, in every respect."""
    return sum(a == b for a, b in zip(things, judge(model).read(pictures), strict=True))

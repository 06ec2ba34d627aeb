"""Latents and text states of all examples, made once and kept in memory; and batches of them.

A picture's latent is the mean that its VAE gives, not a sample around it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import SettingsError
from ..models.pipelines import main_part
from . import pipeline_types, rng

if TYPE_CHECKING:
    from .data import Example
    from .settings import Settings


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one forward pass learns from, each float32 [b, ...].

    Attributes:
        clean, noise: [b, c, h, w].
        time: [b], a number from 0 to 1 drawn evenly; in a flow, the logistic of a normal one.
        guidance: [b], of networks that have it as an input.
        conditions: text states. teaching: those that a teacher gets.
    """

    clean: Tensor
    noise: Tensor
    time: Tensor
    guidance: Tensor
    conditions: pipeline_types.Conditions
    teaching: pipeline_types.Conditions

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(
            clean=self.clean.to(device),
            noise=self.noise.to(device),
            time=self.time.to(device),
            guidance=self.guidance.to(device),
            conditions={name: states.to(device) for name, states in self.conditions.items()},
            teaching={name: states.to(device) for name, states in self.teaching.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """All that is trained on.

    Attributes:
        latents: float32 [n, c, h, w], on the CPU.
        prompts: all captions, each once; the first is the empty one. captions: of each example, numbers of prompts.
        conditions: text states of the prompts. teaching: those that a teacher gets, where they are others.
        side: of the pictures in pixels.
    """

    latents: Tensor
    prompts: tuple[str, ...]
    captions: tuple[tuple[int, ...], ...]
    conditions: pipeline_types.Conditions
    teaching: pipeline_types.Conditions
    side: int

    def digest(self) -> str:
        """A hash of the captions and latents, rounded so that another machine's last bits do not count."""
        told = repr((self.prompts, self.captions, tuple(self.latents.shape)))
        total = hashlib.sha256(told.encode())
        total.update((self.latents * 64).round().to(torch.int32).numpy().tobytes())
        return total.hexdigest()[:16]

    def batch(self, settings: Settings, positions: Sequence[int], *, flow: bool) -> Batch:
        """The examples at these positions of the training; see `chance`."""
        rows, prompts, noise, time, guidance = [], [], [], [], []
        low, high = settings.guidance_min, settings.guidance_max
        for position in positions:
            row = rng.item_at(settings.seed, position, len(self.latents))
            generator = rng.generator(settings.seed, "example", position)
            own = self.captions[row]
            caption = own[int(torch.randint(len(own), (), generator=generator))]
            dropped = float(torch.rand((), generator=generator)) < settings.cond_dropout
            rows.append(row)
            prompts.append(0 if dropped else caption)
            noise.append(torch.randn(self.latents.shape[1:], generator=generator))
            place = torch.randn((), generator=generator).sigmoid() if flow else torch.rand((), generator=generator)
            time.append(place)
            guidance.append(low + (high - low) * torch.rand((), generator=generator))
        return Batch(
            clean=self.latents[rows],
            noise=torch.stack(noise),
            time=torch.stack(time),
            guidance=torch.stack(guidance),
            conditions={name: table[prompts] for name, table in self.conditions.items()},
            teaching={name: table[prompts] for name, table in self.teaching.items()},
        )


def encode(pipe: Any, examples: Sequence[Example], settings: Settings, device: torch.device) -> Encoded:
    """Encode all pictures and captions with the pipeline's VAE and text encoders, which are on the CPU afterwards.

    Raises:
        SettingsError: a resolution that the model cannot have. BadFileError: a picture that cannot be read.
    """
    from ..models.generate import native_size

    side = settings.resolution or native_size(pipe)
    step = 2 ** (len(pipe.vae.config.block_out_channels) - 1) * 2  # patches of 2x2 latents, or a UNet's halving
    if side % step:
        raise SettingsError(
            f"Cannot train at resolution={side}", f"it is not a multiple of {step}", f"Use a multiple of {step}"
        )
    prompts = ("", *sorted({caption for example in examples for caption in example.captions} - {""}))
    number = {prompt: place for place, prompt in enumerate(prompts)}
    with _on(pipe, device):
        latents = _latents(pipe, examples, side, device, settings.progress)
        conditions = _conditions(pipe, prompts, side, settings)
    captions = tuple(tuple(number[caption] for caption in example.captions) for example in examples)
    return Encoded(
        latents=latents, prompts=prompts, captions=captions, conditions=conditions, teaching=conditions, side=side
    )


def with_teacher(data: Encoded, pipe: Any, settings: Settings, device: torch.device) -> Encoded:
    """The same, with the text states that the encoders of a teacher's pipeline give."""
    with _on(pipe, device):
        return replace(data, teaching=_conditions(pipe, data.prompts, data.side, settings))


@contextmanager
def _on(pipe: Any, device: torch.device) -> Iterator[None]:
    """The pipeline's VAE and text encoders on a device, and on the CPU afterwards."""
    main = main_part(pipe)
    helpers = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module) and part is not main]
    for part in helpers:
        part.eval().requires_grad_(False).to(device)
    try:
        yield
    finally:
        for part in helpers:
            part.to("cpu")


def _latents(pipe: Any, examples: Sequence[Example], side: int, device: torch.device, progress: bool) -> Tensor:
    from tqdm import tqdm

    config, shift = pipe.vae.config, 0.0
    if pipeline_types.of(pipe).shift:
        shift = config.shift_factor or 0.0
    made, size = [], 16
    for begin in tqdm(
        range(0, len(examples), size), desc="Encoding pictures", unit="batch", disable=not progress, leave=False
    ):
        pixels = torch.stack([example.pixels(side) for example in examples[begin : begin + size]])
        with torch.no_grad():
            mean = pipe.vae.encode(pixels.to(device, pipe.vae.dtype)).latent_dist.mean.float().cpu()
        made.append((mean - shift) * config.scaling_factor)
    return torch.cat(made)


def _conditions(pipe: Any, prompts: Sequence[str], side: int, settings: Settings) -> pipeline_types.Conditions:
    """The text states of all prompts: float32, on the CPU."""
    from tqdm import tqdm

    made: dict[str, list[Tensor]] = {}
    size = 16
    for begin in tqdm(
        range(0, len(prompts), size), desc="Encoding captions", unit="batch", disable=not settings.progress, leave=False
    ):
        some = pipeline_types.encode(pipe, list(prompts[begin : begin + size]), settings.max_sequence_length or 0, side)
        for name, states in some.items():
            made.setdefault(name, []).append(states.float().cpu())
    return {name: torch.cat(parts) for name, parts in made.items()}

"""Latents and text states of all examples, encoded once and kept in memory, and batches of them.

A picture's latent is the mean of the VAE's distribution, not a sample of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..errors import SettingsError
from ..models import main_part
from ..utils.progress import count_bar
from . import pipeline_types, rng

if TYPE_CHECKING:
    from .data import Example
    from .settings import TrainingSettings

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs of one forward pass, each float32 [b, ...].

    Attributes:
        clean, noise: [b, c, h, w].
        time: [b], uniform in 0 to 1; for flow matching, logit-normal.
        guidance: [b], for networks that have it as an input.
        conditions: text states. teaching: those for the teacher.
    """

    clean: Tensor
    noise: Tensor
    time: Tensor
    guidance: Tensor
    conditions: pipeline_types.Conditions
    teaching: pipeline_types.Conditions

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
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
    """The encoded training data.

    Attributes:
        latents: float32 [n, c, h, w], on the CPU.
        prompts: the unique captions; the first is empty. captions: for each example, indices into prompts.
        conditions: text states of the prompts. teaching: those for the teacher, if they differ.
        side: of the pictures in pixels.
    """

    latents: Tensor
    prompts: tuple[str, ...]
    captions: tuple[tuple[int, ...], ...]
    conditions: pipeline_types.Conditions
    teaching: pipeline_types.Conditions
    side: int

    def digest(self) -> str:
        """Return a hash of the captions and latents, rounded so that it does not depend on a machine's last bits."""
        text = repr((self.prompts, self.captions, tuple(self.latents.shape)))
        total = hashlib.sha256(text.encode())
        total.update((self.latents * 64).round().to(torch.int32).numpy().tobytes())
        return total.hexdigest()[:16]

    def batch(self, settings: TrainingSettings, positions: Sequence[int], *, flow: bool) -> Batch:
        """Return a batch of the examples at these positions of the training; see `rng`."""
        rows, prompts, noise, time, guidance = [], [], [], [], []
        low, high = settings.guidance_min, settings.guidance_max
        for position in positions:
            row = rng.item_at(settings.seed, position, len(self.latents))
            generator = rng.generator(settings.seed, "example", position)
            own = self.captions[row]
            caption = own[int(torch.randint(len(own), (), generator=generator, device="cpu"))]
            dropped = float(rng.uniform(generator)) < settings.cond_dropout
            rows.append(row)
            prompts.append(0 if dropped else caption)
            noise.append(rng.normal(generator, self.latents.shape[1:]))
            time.append(rng.normal(generator).sigmoid() if flow else rng.uniform(generator))
            guidance.append(low + (high - low) * rng.uniform(generator))
        return Batch(
            clean=self.latents[rows],
            noise=torch.stack(noise),
            time=torch.stack(time),
            guidance=torch.stack(guidance),
            conditions={name: table[prompts] for name, table in self.conditions.items()},
            teaching={name: table[prompts] for name, table in self.teaching.items()},
        )


def encode(pipe: Any, examples: Sequence[Example], settings: TrainingSettings, device: torch.device) -> Encoded:
    """Encode all pictures and captions with the pipeline's VAE and text encoders, which are on the CPU afterwards.

    Raises:
        SettingsError: the model does not support the resolution. BadFileError: a picture cannot be read.
    """
    from ..models import native_size

    side = settings.resolution or native_size(pipe)
    step = 2 ** (len(pipe.vae.config.block_out_channels) - 1) * 2  # patches of 2x2 latents, or a UNet's halving
    if side % step:
        raise SettingsError(
            f"Cannot train at resolution={side}", f"it is not a multiple of {step}", f"Use a multiple of {step}"
        )
    prompts = ("", *sorted({caption for example in examples for caption in example.captions} - {""}))
    number = {prompt: place for place, prompt in enumerate(prompts)}
    with helpers_on(pipe, device):
        latents = _latents(pipe, examples, side, device, settings.progress)
        conditions = _conditions(pipe, prompts, side, settings)
    captions = tuple(tuple(number[caption] for caption in example.captions) for example in examples)
    return Encoded(
        latents=latents, prompts=prompts, captions=captions, conditions=conditions, teaching=conditions, side=side
    )


def with_teacher(data: Encoded, pipe: Any, settings: TrainingSettings, device: torch.device) -> Encoded:
    """Return the data with text states from a teacher pipeline's encoders."""
    with helpers_on(pipe, device):
        return replace(data, teaching=_conditions(pipe, data.prompts, data.side, settings))


@contextmanager
def helpers_on(pipe: Any, device: torch.device) -> Iterator[None]:
    """Context with the pipeline's VAE and text encoders on a device; they are on the CPU afterwards."""
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
    config, shift = pipe.vae.config, 0.0
    if pipeline_types.of(pipe).shift:
        shift = config.shift_factor or 0.0
    latents = []
    for batch in _batches("pictures", examples, progress):
        pixels = torch.stack([example.pixels(side) for example in batch])
        with torch.no_grad():
            mean = pipe.vae.encode(pixels.to(device, pipe.vae.dtype)).latent_dist.mean.float().cpu()
        latents.append((mean - shift) * config.scaling_factor)
    return torch.cat(latents)


def _conditions(pipe: Any, prompts: Sequence[str], side: int, settings: TrainingSettings) -> pipeline_types.Conditions:
    """Encode all prompts: text states in float32, on the CPU."""
    batches: dict[str, list[Tensor]] = {}
    for batch in _batches("captions", prompts, settings.progress):
        some = pipeline_types.encode(pipe, list(batch), settings.max_sequence_length or 0, side)
        for name, states in some.items():
            batches.setdefault(name, []).append(states.float().cpu())
    return {name: torch.cat(parts) for name, parts in batches.items()}


def _batches(what: str, items: Sequence[T], progress: bool) -> Iterator[Sequence[T]]:
    size = 16
    begins = range(0, len(items), size)
    for begin in count_bar(f"Encoding {what}", len(begins), "batch", progress, iterable=begins):
        yield items[begin : begin + size]

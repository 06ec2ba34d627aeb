"""Draw with a loaded pipeline: the same call for every kind, with the sizes of small models put in."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from .errors import SettingsError


def draw(
    pipe: Any,
    prompts: Sequence[str],
    *,
    seeds: Sequence[int],
    steps: int,
    guidance: float | None = None,
    width: int | None = None,
    height: int | None = None,
    batch: int = 10,
    progress: bool = False,
) -> list[Any]:
    """One PIL image for each prompt; image i is the same for seed i whatever the batch.

    Raises:
        SettingsError: the model is a component alone, which takes no prompt, or a size it cannot draw.
    """
    import torch
    from tqdm import tqdm

    from .components import is_pipeline

    if not is_pipeline(pipe):
        raise SettingsError(
            f"A prompt was given to a {type(pipe).__name__}",
            "it is one component of a pipeline and cannot draw",
            "Give the pipeline's folder, or base=<pipeline folder> together with the component",
        )
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise SettingsError("A prompt was given that is no text", "prompts are strings", 'Give it as "a text"')
    side = native_size(pipe)
    values: dict[str, Any] = {"height": height or side, "width": width or side, "num_inference_steps": steps}
    if guidance is not None:
        values["guidance_scale"] = guidance
    known = set(inspect.signature(type(pipe).__call__).parameters)
    values = {name: value for name, value in values.items() if name in known}
    pipe.set_progress_bar_config(disable=True)
    images: list[Any] = []
    chunks = [slice(i, i + batch) for i in range(0, len(prompts), batch)]
    with tqdm(
        total=steps * len(chunks), desc="Drawing", unit="step", disable=not progress, delay=2, leave=False
    ) as bar:

        def step(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            bar.update()
            return tensors

        for chunk in chunks:
            generators = [torch.Generator().manual_seed(seed) for seed in seeds[chunk]]
            try:
                made = pipe(prompt=list(prompts[chunk]), generator=generators, callback_on_step_end=step, **values)
            except ValueError as error:
                if "divisible" not in str(error):
                    raise
                raise SettingsError(
                    f"An image of {values['width']}x{values['height']} was asked for",
                    str(error),
                    f"Use multiples of {side}",
                ) from error
            images += made.images
    return images


def native_size(pipe: Any) -> int:
    """The side in pixels that the model was trained for, as far as its parts tell."""
    vae = pipe.components.get("vae")
    unet = pipe.components.get("unet")
    factor = 2 ** (len(vae.config.block_out_channels) - 1) if vae is not None else 8
    if unet is not None and isinstance(unet.config.sample_size, int):
        return int(unet.config.sample_size) * factor
    sample = vae.config.sample_size if vae is not None else None
    return int(sample) if isinstance(sample, int) else 1024

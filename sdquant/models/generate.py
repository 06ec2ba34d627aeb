"""Generate images with a loaded pipeline: the same call for every kind, with the native size as default."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..utils.progress import count_bar
from . import start_images
from .pipeline_traits import takes_negative

if TYPE_CHECKING:
    from .start_images import StartImage

log = logging.getLogger(__name__)

# Steps done, and steps in all.
OnStep = Callable[[int, int], None]


class Stopped(Exception):
    """The user cancelled the generation. `on_step` raises it to stop, and `draw` lets it through."""


def draw(
    pipe: Any,
    prompts: Sequence[str],
    *,
    seeds: Sequence[int],
    steps: int,
    guidance: float | None = None,
    negative: str = "",
    width: int | None = None,
    height: int | None = None,
    start: StartImage | None = None,
    batch: int = 10,
    progress: bool = False,
    on_step: OnStep | None = None,
) -> list[Any]:
    """Generate one PIL image for each prompt, the i-th from noise of the i-th seed.

    The noise does not depend on `batch`; sums in the networks may round differently in batches of another size.

    Args:
        negative: negative prompt for all images.
        start: image to start from; the pipeline is then one of `start_images.pipeline_for`.
        batch: images generated at once.
        on_step: called with the steps done and the steps in all of all batches: before the first step, and after each.
            The total changes at the first step if the scheduler takes more steps than requested. An exception that it
            raises stops the generation and is passed on unchanged; the pipeline can be used again.

    Raises:
        Stopped: `on_step` raised it.
        SettingsError: the model is a single component, which takes no prompt, or does not support a negative one; a
            prompt is not a string, steps or seeds are out of range, or the model cannot generate the size.
    """
    import torch

    _refuse(pipe, prompts, seeds, steps)
    known = set(inspect.signature(type(pipe).__call__).parameters)
    if negative:
        _refuse_negative(pipe, guidance)
    side = native_size(pipe)
    size = (width or side, height or side)
    if start is not None:
        start_images.refuse_steps(start, steps)
        size = start_images.size_for(pipe, start, side, width, height)
        start = start.sized(size)
    values: dict[str, Any] = {"height": size[1], "width": size[0], "num_inference_steps": steps}
    values |= start.arguments() if start is not None else {}
    if guidance is not None:
        values["guidance_scale"] = guidance
    pipe.set_progress_bar_config(disable=True)
    images: list[Any] = []
    chunks = [slice(i, i + batch) for i in range(0, len(prompts), batch)]
    with count_bar("Drawing", steps * len(chunks), "step", progress) as bar:
        count = _Steps(steps, len(chunks), bar, on_step)
        values["callback_on_step_end"] = count
        values = {name: value for name, value in values.items() if name in known}
        for number, chunk in enumerate(chunks):
            generators = [torch.Generator().manual_seed(seed) for seed in seeds[chunk]]
            try:
                inputs: dict[str, Any] = {"prompt": list(prompts[chunk])}
                if negative:
                    inputs["negative_prompt"] = [negative] * len(inputs["prompt"])
                output = pipe(**inputs, generator=generators, **values)
            except BaseException as error:
                pipe.maybe_free_model_hooks()  # which the pipeline itself does at its end only
                if error is count.raised or not isinstance(error, ValueError) or "divisible" not in str(error):
                    raise
                raise SettingsError(
                    f"Cannot generate a {values['width']}x{values['height']} image",
                    str(error).rstrip("."),
                    f"Leave the size out to get {side}x{side}, or use multiples of the number named above",
                ) from error
            images += output.images if start is None else map(start.outside_kept, output.images)
            count.batch_done(number)
    _tell_size(images, size)
    return images


class _Steps:
    """Counts denoising steps, for the bar and the caller; called by the pipeline after each.

    Attributes:
        raised: what the caller's function raised.
    """

    def __init__(self, steps: int, batches: int, bar: Any, on_step: OnStep | None) -> None:
        self._each, self._batches, self._bar, self._on_step = steps, batches, bar, on_step
        self._done = 0
        self.raised: BaseException | None = None
        self._tell()

    def __call__(self, pipe: Any, _: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        # Some schedulers take more steps than they were asked for: PNDM one, Heun's nearly twice as many.
        self._each = getattr(pipe, "num_timesteps", None) or self._each
        self._done += 1
        self._tell()
        return tensors

    def batch_done(self, number: int) -> None:
        """Record that batch `number` is done, for pipelines that do not call back after each step."""
        if self._done < (number + 1) * self._each:
            self._done = (number + 1) * self._each
            self._tell()

    def _tell(self) -> None:
        self._bar.total = self._each * self._batches
        self._bar.update(self._done - self._bar.n)
        if self._on_step is None:
            return
        try:
            self._on_step(self._done, self._bar.total)
        except BaseException as error:
            self.raised = error
            raise


def native_size(pipe: Any) -> int:
    """Return the image size in pixels that the model was trained for, from its components' configs."""
    vae = pipe.components.get("vae")
    unet = pipe.components.get("unet")
    factor = 2 ** (len(vae.config.block_out_channels) - 1) if vae is not None else 8
    if unet is not None and isinstance(unet.config.sample_size, int):
        return int(unet.config.sample_size) * factor
    sample = vae.config.sample_size if vae is not None else None
    return int(sample) if isinstance(sample, int) else 1024


def _refuse(pipe: Any, prompts: Sequence[str], seeds: Sequence[int], steps: int) -> None:
    from .pipelines import is_pipeline

    if not is_pipeline(pipe):
        raise SettingsError(
            f"Cannot use a prompt with {type(pipe).__name__}",
            "it is a single component, not a pipeline",
            "Use the pipeline's folder, or pass base=<pipeline folder> together with the component",
        )
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise SettingsError("Invalid prompt", "prompts must be strings", 'Pass it as "a text"')
    if len(seeds) != len(prompts):
        raise SettingsError(
            f"Cannot use {len(prompts)} prompts with {len(seeds)} seeds",
            "each image has its own prompt and seed",
            "Pass one seed for each prompt",
        )
    for name, value, least in (("steps", steps, 1), *(("seed", seed, 0) for seed in seeds)):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise SettingsError(
                f"Invalid {name} {value!r}", f"it must be a whole number from {least} to 2**63 - 1", "Use such a number"
            )


def _refuse_negative(pipe: Any, guidance: float | None) -> None:
    """Refuse a negative prompt where it would have no effect."""
    what = f"Cannot use a negative prompt with {type(pipe).__name__}"
    if not takes_negative(type(pipe)):
        raise SettingsError(what, "it does not support one", "Leave it out")
    if guidance is not None and guidance <= 1:
        raise SettingsError(
            what,
            f"with a guidance of {guidance:g} it has no effect",
            "Use a guidance of more than 1, or leave the negative prompt out",
        )


def _tell_size(images: Sequence[Any], size: tuple[int, int]) -> None:
    """Log a warning if the pipeline rounded a size that it cannot generate instead of raising."""
    if images and images[0].size != size:
        actual = "x".join(map(str, images[0].size))
        log.warning("the images are %s, because the model cannot generate %sx%s", actual, *size)

"""What a pipeline takes besides a prompt, by its class and the files of its folder: nothing is loaded.

Sampler names are those of AUTOMATIC1111's web UI, which pictures carry; the classes are diffusers'.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..utils.quiet_imports import quiet_imports
from . import libraries, start_images


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A row of samplers: a scheduler class of diffusers, and the options that make it this one, where a model's own
    config does not say them."""

    name: str
    scheduler: str
    options: Mapping[str, Any] = field(default_factory=dict)


# For models that predict noise; those of flow matching have a schedule of their own.
SAMPLERS = (
    Sampler(name="Euler", scheduler="EulerDiscreteScheduler"),
    Sampler(name="Euler a", scheduler="EulerAncestralDiscreteScheduler"),
    Sampler(name="Heun", scheduler="HeunDiscreteScheduler"),
    Sampler(name="DPM++ 2M", scheduler="DPMSolverMultistepScheduler"),
    Sampler(name="DPM++ 2M Karras", scheduler="DPMSolverMultistepScheduler", options={"use_karras_sigmas": True}),
    Sampler(
        name="DPM++ 2M SDE", scheduler="DPMSolverMultistepScheduler", options={"algorithm_type": "sde-dpmsolver++"}
    ),
    Sampler(name="DDIM", scheduler="DDIMScheduler", options={"clip_sample": False}),  # which spoils latents
    Sampler(name="UniPC", scheduler="UniPCMultistepScheduler"),
    Sampler(name="PLMS", scheduler="PNDMScheduler", options={"skip_prk_steps": True}),
    Sampler(name="LCM", scheduler="LCMScheduler"),
)
# Options that belong to one sampler: another one does not take them over.
_OF_ONE = frozenset(
    ("algorithm_type", "skip_prk_steps", "solver_order", "solver_type", "use_beta_sigmas", "use_exponential_sigmas",
     "use_karras_sigmas", "use_lu_lambdas")
)  # fmt: skip
_PREDICTIONS = (None, "epsilon", "v_prediction")  # those that all of them know


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a pipeline takes: a negative prompt, a start image, and the names of samplers besides its own."""

    negative: bool = False
    image: bool = False
    samplers: tuple[str, ...] = ()


def traits(folder: str | Path) -> Traits:
    """Return the traits of the pipeline in a folder; those of none if there is no pipeline that diffusers knows."""
    name = _class_name(folder)
    with quiet_imports():  # of the pipeline's class
        kind = getattr(libraries.diffusers(), name, None)
    if not inspect.isclass(kind):
        return Traits()
    config = _json(Path(folder) / "scheduler" / "scheduler_config.json")
    is_noise = _predicts_noise(str(config.get("_class_name")), config)
    return Traits(
        negative=takes_negative(kind),
        image=start_images.takes_image(name),
        samplers=tuple(row.name for row in SAMPLERS if is_noise),
    )


def starts_from_image(folder: str | Path) -> bool:
    """Return `Traits.image` of the pipeline in a folder, without its class, whose import takes seconds."""
    return start_images.takes_image(_class_name(folder))


def _class_name(folder: str | Path) -> str:
    return str(_json(Path(folder) / "model_index.json").get("_class_name"))


def _predicts_noise(scheduler: str, config: Mapping[str, Any]) -> bool:
    """Return whether a model with this scheduler predicts noise; UniPC and DPM++ serve those of flow matching, too."""
    is_flow = config.get("use_flow_sigmas") or config.get("prediction_type") not in _PREDICTIONS
    return not is_flow and any(row.scheduler == scheduler for row in SAMPLERS)


def takes_negative(kind: type) -> bool:
    """Return whether a pipeline class takes a negative prompt that its guidance scale makes work."""
    known = inspect.signature(kind.__call__).parameters
    # Pipelines that have `true_cfg_scale` use one with it alone, and are not given it here.
    return "negative_prompt" in known and "true_cfg_scale" not in known


@contextmanager
def sampling_with(pipe: Any, sampler: str | None) -> Iterator[None]:
    """Give a pipeline another sampler for a while; None keeps its own.

    Raises:
        SettingsError: there is no such sampler, or not for this pipeline.
    """
    own = getattr(pipe, "scheduler", None)
    if sampler is None:
        yield
        return
    row = next((row for row in SAMPLERS if row.name == sampler), None)
    if row is None or own is None or not _predicts_noise(type(own).__name__, own.config):
        raise SettingsError(
            f"Cannot sample with {sampler!r}",
            f"{type(pipe).__name__} does not support it",
            "Use the model's own sampler",
        )
    config = {key: value for key, value in own.config.items() if key not in _OF_ONE}
    pipe.scheduler = getattr(libraries.diffusers(), row.scheduler).from_config({**row.options, **config})
    try:
        yield
    finally:
        pipe.scheduler = own


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

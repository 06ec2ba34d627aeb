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


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A row of samplers: a scheduler class of diffusers, and the options that make it this one."""

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
    Sampler(name="DDIM", scheduler="DDIMScheduler"),
    Sampler(name="UniPC", scheduler="UniPCMultistepScheduler"),
    Sampler(name="PLMS", scheduler="PNDMScheduler"),
    Sampler(name="LCM", scheduler="LCMScheduler"),
)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a pipeline takes: a negative prompt, and the names of samplers besides its own."""

    negative: bool = False
    samplers: tuple[str, ...] = ()


def traits(folder: str | Path) -> Traits:
    """Return the traits of the pipeline in a folder; those of none if there is no pipeline that diffusers knows."""
    import diffusers

    kind = getattr(diffusers, str(_json(Path(folder) / "model_index.json").get("_class_name")), None)
    if not inspect.isclass(kind):
        return Traits()
    scheduler = str(_json(Path(folder) / "scheduler" / "scheduler_config.json").get("_class_name"))
    noise = any(row.scheduler == scheduler for row in SAMPLERS)
    return Traits(negative=takes_negative(kind), samplers=tuple(row.name for row in SAMPLERS if noise))


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
    if row is None or own is None or not any(one.scheduler == type(own).__name__ for one in SAMPLERS):
        raise SettingsError(
            f"Cannot sample with {sampler!r}",
            f"{type(pipe).__name__} does not support it",
            "Use the model's own sampler",
        )
    import diffusers

    pipe.scheduler = getattr(diffusers, row.scheduler).from_config(own.config, **row.options)
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

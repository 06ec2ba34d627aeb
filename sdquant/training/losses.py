"""Training objectives: the target of the network's prediction, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import SettingsError
from ..models import libraries

if TYPE_CHECKING:
    from .latent_cache import Batch
    from .pipeline_types import PipelineType

TARGETS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "epsilon": lambda scheduler, clean, noise, time: noise,
    "sample": lambda scheduler, clean, noise, time: clean,
    "v_prediction": lambda scheduler, clean, noise, time: scheduler.get_velocity(clean, noise, time),
}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss of a batch.

    Attributes:
        scheduler: a DDPMScheduler; None for flow matching. target: one of `TARGETS`.
        shift: of the time in flow matching: t' = s t / (1 + (s - 1) t), from the pipeline's scheduler.
        teacher: a network whose predictions are the target instead of the data's.
    """

    family: PipelineType
    scheduler: Any = None
    target: str = ""
    shift: float = 1.0
    teacher: Any = None

    def loss(self, net: Any, batch: Batch) -> Tensor:
        """Return the mean squared error of the network's predictions, a float32 scalar."""
        noisy, time, target = self.question(batch)
        if self.teacher is not None:
            with torch.no_grad():
                target = self.family.call(self.teacher, noisy, time, batch.teaching, batch.guidance)
        answer = self.family.call(net, noisy, time, batch.conditions, batch.guidance)
        return (answer.float() - target.float()).square().mean()

    def question(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return noisy latents [b, c, h, w], time [b] as the network takes it, and the data's target [b, c, h, w].

        In flow matching x_t = (1 - t) x + t noise, and the target is its derivative, noise - x (arXiv:2210.02747).
        """
        if self.scheduler is None:
            time = self.shift * batch.time / (1 + (self.shift - 1) * batch.time)
            t = time[:, None, None, None]
            return (1 - t) * batch.clean + t * batch.noise, time, batch.noise - batch.clean
        count = self.scheduler.config.num_train_timesteps
        steps = (batch.time * count).long().clamp(max=count - 1)
        noisy = self.scheduler.add_noise(batch.clean, batch.noise, steps)
        return noisy, steps, TARGETS[self.target](self.scheduler, batch.clean, batch.noise, steps)


def of(pipe: Any, family: PipelineType, teacher: Any = None) -> Objective:
    """Return the objective of a pipeline, by its scheduler.

    Raises:
        SettingsError: the scheduler is not for this kind of pipeline, or has an unknown prediction type.
    """
    config = pipe.scheduler.config
    name = type(pipe.scheduler).__name__
    if family.flow:
        if "FlowMatch" not in name:
            why = f"a {type(pipe).__name__} is trained by flow matching, which needs a FlowMatch scheduler"
            raise _unknown(name, why)
        shift = 1.0 if config.get("use_dynamic_shifting") else float(config.get("shift", 1.0))
        return Objective(family=family, shift=shift, teacher=teacher)
    target = config.get("prediction_type")
    if target not in TARGETS:
        raise _unknown(name, f"its prediction_type is {target!r}, not one of {', '.join(TARGETS)}")
    scheduler = libraries.diffusers().DDPMScheduler.from_config(config)
    return Objective(family=family, scheduler=scheduler, target=str(target), teacher=teacher)


def _unknown(name: str, why: str) -> SettingsError:
    return SettingsError(f"Cannot train a pipeline with a {name}", why, "Replace its scheduler with one of that kind")

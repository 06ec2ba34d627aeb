"""The training loop, on accelerate: one process or several, with gradient accumulation and clipping."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import TrainingError
from ..utils.atomic_write import remove
from . import checkpoints, rng, trainable
from .metrics_log import Line, Log

if TYPE_CHECKING:
    from ..utils.signals import Interrupts
    from .latent_cache import Batch, Encoded
    from .losses import Objective
    from .settings import TrainingSettings

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingJob:
    """One training, prepared by accelerate.

    Attributes:
        net: the network as wrapped by accelerate. ema: diffusers' EMAModel of its weights, or None.
        identity: the settings that a resumed training must share.
        step: steps done. abandoned: checkpoints later than the one that the training was resumed from.
    """

    accelerator: Any
    settings: TrainingSettings
    net: Any
    optimizer: Any
    schedule: Any
    objective: Objective
    data: Encoded
    identity: dict[str, Any]
    ema: Any = None
    step: int = 0
    abandoned: list[checkpoints.Checkpoint] = field(default_factory=list)

    @property
    def bare(self) -> Any:
        """Return the unwrapped network."""
        return self.accelerator.unwrap_model(self.net)

    @property
    def learning(self) -> list[Any]:
        """Return the weights that are trained."""
        return [row for row in self.bare.parameters() if row.requires_grad]


def prepare_training(
    accelerator: Any, settings: TrainingSettings, net: Any, objective: Objective, data: Encoded
) -> TrainingJob:
    """Create optimizer, schedule and EMA for a network, and prepare them with accelerate."""
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    learning = [row for row in net.parameters() if row.requires_grad]
    optimizer = torch.optim.AdamW(
        learning, lr=settings.learning_rate, betas=(settings.adam_b1, settings.adam_b2), eps=settings.adam_eps,
        weight_decay=settings.adam_weight_decay,
    )  # fmt: skip
    schedule = get_scheduler(
        settings.lr_scheduler, optimizer, num_training_steps=settings.max_train_steps,
        num_warmup_steps=round(settings.max_train_steps * settings.warmup_steps_fraction),
    )  # fmt: skip
    ema = EMAModel(learning, decay=settings.ema) if settings.ema else None
    net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    checkpoints.attach_state(accelerator)
    if ema is not None:
        ema.to(accelerator.device)
        accelerator.register_for_checkpointing(ema)
    identity = {"settings": settings.fixed(), "data": data.digest(), "processes": accelerator.num_processes}
    return TrainingJob(
        accelerator=accelerator, settings=settings, net=net, optimizer=optimizer, schedule=schedule,
        objective=objective, data=data, identity=identity, ema=ema,
    )  # fmt: skip


def run(job: TrainingJob, record: Log | None, interrupts: Interrupts, each: Callable[[Line], None]) -> bool:
    """Train to the end, or until a signal arrives in any process; a checkpoint is written in either case.

    Args:
        record: the log; None in all processes but the first. each: called after each step.

    Returns:
        True if the training was completed.

    Raises:
        TrainingError: the loss or the gradient is no longer finite.
    """
    settings = job.settings
    job.net.train()
    while job.step < settings.max_train_steps:
        rate = float(job.schedule.get_last_lr()[0])
        loss, norm, stop = _step(job, interrupts.seen is not None)
        job.step += 1
        line = Line(step=job.step, loss=loss, lr=rate, grad_norm=norm)
        last = job.step == settings.max_train_steps
        if record is not None and (last or stop or job.step % settings.log_every == 0):
            record.add(line)
        due = settings.checkpoint_every and job.step % settings.checkpoint_every == 0
        if last or stop or due:
            save(job)
        each(line)
        if stop and not last:
            return False
    return True


def _step(job: TrainingJob, stop: bool) -> tuple[float, float, bool]:
    """Run one optimizer step; return the mean loss, the gradient norm, and whether any process has to stop."""
    accelerator, settings = job.accelerator, job.settings
    total, norm = torch.zeros((), device=accelerator.device, dtype=torch.float32), math.nan
    for number in range(settings.gradient_accumulation_steps):
        place = (job.step, number, accelerator.process_index)
        torch.manual_seed(rng.seed_of(settings.seed, "step", *place))  # for what the network draws: dropout
        batch = _batch(job, number)
        with accelerator.accumulate(job.net):
            loss = job.objective.loss(job.net, batch)
            accelerator.backward(loss)
            total += loss.detach() / settings.gradient_accumulation_steps
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(job.learning, settings.max_grad_norm or math.inf))
                if accelerator.scaler is None and not math.isfinite(norm):  # the same in all processes
                    raise _not_finite(job, float(total), norm)
            job.optimizer.step()
            if accelerator.sync_gradients:
                job.schedule.step()
            job.optimizer.zero_grad()
    if job.ema is not None:
        job.ema.step(job.learning)
    sums = accelerator.reduce(torch.stack([total, total.new_tensor(float(stop))]), reduction="sum")
    mean = float(sums[0]) / accelerator.num_processes
    if not math.isfinite(mean):
        raise _not_finite(job, mean, norm)
    return mean, norm, bool(sums[1] > 0)


def _batch(job: TrainingJob, number: int) -> Batch:
    """Return this process's batch of one forward pass. The batches of all processes are consecutive."""
    settings, accelerator = job.settings, job.accelerator
    passes = job.step * settings.gradient_accumulation_steps + number
    begin = (passes * accelerator.num_processes + accelerator.process_index) * settings.per_device_batch_size
    positions = range(begin, begin + settings.per_device_batch_size)
    return job.data.batch(settings, positions, flow=job.objective.family.flow).to(accelerator.device)


def _not_finite(job: TrainingJob, loss: float, norm: float) -> TrainingError:
    """Return the error, raised before the weights are updated. With fp16 a gradient that is not finite is not an error
    by itself: the scaler skips such steps."""
    saved = checkpoints.found(job.settings.folder / "checkpoints")
    last = f"the last checkpoint is from step {saved[-1].step}" if saved else "there is no checkpoint yet"
    return TrainingError(
        f"Training diverged at step {job.step + 1}",
        f"the loss is {loss:g} and the gradient norm {norm:g}; {last}",
        "Start a run with a lower learning_rate or max_grad_norm, or with mixed_precision=no",
    )


def save(job: TrainingJob) -> None:
    """Write a checkpoint of the current step."""
    place = job.settings.folder / "checkpoints"
    if job.accelerator.is_main_process:
        for old in job.abandoned:
            remove(old.path)
    job.abandoned = []
    keep = job.settings.checkpoints_to_keep
    checkpoints.write(job.accelerator, place, job.step, job.identity, keep, bytes_of(job))


def resume(job: TrainingJob, checkpoint: checkpoints.Checkpoint) -> None:
    """Resume from a checkpoint. Later ones are removed when the next is written."""
    checkpoints.read(job.accelerator, checkpoint, job.identity, job.settings)
    job.step = checkpoint.step
    job.abandoned = [row for row in checkpoints.found(checkpoint.path.parent) if row.step > checkpoint.step]


def bytes_of(job: TrainingJob) -> int:
    """Return the bytes of a checkpoint: the weights, AdamW's two moments, and the EMA weights."""
    weights: int = sum(row.nbytes for row in trainable.state_of(job.bare).values())
    learning: int = sum(row.nbytes for row in job.learning)
    return weights + learning * (3 if job.ema is not None else 2) + (1 << 20)

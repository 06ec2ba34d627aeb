"""From settings to a trained model, read top to bottom.

output_dir/run_name/
    config.yml        what was asked for
    log.jsonl         step, loss, lr and grad_norm, a line for each step
    loss.png          the same as a picture
    samples/          step-N.png: what the model draws
    checkpoints/      step-N: what `resume` goes on from
    model/            the trained pipeline; of a LoRA training lora/, the LoRA alone
"""

from __future__ import annotations

import copy
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..utils.distributed import launched
from . import checkpoints, data, latent_cache, metrics_log, pipeline_types, samples, trainable
from . import losses as objectives
from . import pipeline as model
from .config.generate import save as save_config
from .config.keys import key
from .config.loading import shards_of
from .settings import settings_of
from .signals import Interrupts

if TYPE_CHECKING:
    from . import loop
    from .config import Config
    from .settings import Settings

log = logging.getLogger(__name__)

PROMPTS = 6  # drawn on a sheet where none were given: captions of the data


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a training came to.

    Attributes:
        model: folder of the trained pipeline, or of the LoRA.
        steps: all that are done. begun: those that were done when this session began.
        examples: pictures in the data. weights: numbers that were trained.
        first: whether this is the first of the processes, which writes and speaks.
        first_loss: of the first step. loss: the running mean at the end. seconds: of this session.
        pictures: the curve and the sheets.
    """

    first: bool
    folder: str
    model: str
    steps: int
    begun: int
    examples: int
    weights: int
    first_loss: float
    loss: float
    seconds: float
    processes: int
    checkpoints: tuple[str, ...]
    pictures: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def train(config: Config, *, progress: bool = False) -> Summary:
    """Train as a config asks.

    Raises:
        SdquantError: one of its kinds: data or model cannot be trained on, a checkpoint cannot be gone on from, the
            loss is not finite, there is no room. KeyboardInterrupt, or what SIGTERM does: after a checkpoint.
    """
    begin = time.perf_counter()
    settings = settings_of(config, progress=progress)
    checkpoint = checkpoints.choose(settings.folder / "checkpoints", settings.resume)
    rows = data.examples(settings)
    with _accelerator(settings) as accelerator, Interrupts() as interrupts:
        whole = model.load(settings)
        pipe = whole.pipe
        family = pipeline_types.of(pipe)
        _tell_guidance(settings, whole)
        made = latent_cache.encode(pipe, rows, settings, accelerator.device)
        made, teacher = _taught(settings, whole, made, accelerator.device)
        objective = objectives.of(pipe, family, teacher)
        net = trainable.trainable(whole.net, settings, whole.quantized)
        from . import loop

        job = loop.prepare(accelerator, settings, net, objective, made)
        _require_space(job)
        if checkpoint is not None:
            loop.resume(job, checkpoint)
        begun, count = job.step, sum(row.numel() for row in job.learning)
        first = accelerator.is_main_process
        if first:
            save_config(config, settings.folder / "config.yml", shards_of(config))
        kept = metrics_log.Log(settings.folder / "log.jsonl", job.step) if first else None
        try:
            with _bar(settings, job, shown=first) as told:
                done = loop.run(job, kept, interrupts, _after_each(job, pipe, told, shown=first))
        finally:
            if kept is not None:
                kept.close()
        if kept is not None and kept.lines:
            _draw_curve(settings, kept.lines)
        if not done:
            _stop(settings, job.step, interrupts)
        target = _finish(job, whole) if first else _place(settings)
        accelerator.wait_for_everyone()
        return _summary(job, kept, target, begun=begun, weights=count, seconds=time.perf_counter() - begin)


@contextmanager
def _accelerator(settings: Settings) -> Iterator[Any]:
    """accelerate's engine for one training; what it keeps in the process goes at the end."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from ..compat.hardware import default_device, probe

    # accelerate has processes on the CPU work together only if it is told to use that: else each would train alone.
    on_cpu = settings.device == "cpu" or (settings.device is None and default_device(probe()) == "cpu")
    made = Accelerator(
        cpu=on_cpu,
        mixed_precision=settings.mixed_precision,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        step_scheduler_with_optimizer=False,  # or it would step once for each process
    )
    known = ("NO", "MULTI_CPU", "MULTI_GPU")
    try:
        if settings.device not in (None, made.device.type):
            raise SettingsError(
                f"Cannot train on device={settings.device}", f"accelerate uses {made.device} here",
                "Leave device out, or use cpu",
            )  # fmt: skip
        if made.distributed_type.value not in known:
            raise SettingsError(
                f"Cannot train with accelerate's {made.distributed_type.value}",
                f"only {', '.join(known)} are supported", "Change it with: accelerate config",
            )  # fmt: skip
        if launched() and made.num_processes == 1:
            raise SettingsError(
                "Cannot train in the processes started by torchrun",
                f"accelerate lets each of them train alone on {made.device}, all into one folder",
                "Set device=cpu, or start without torchrun",
            )
        yield made
    finally:
        made.free_memory()
        AcceleratorState._reset_state()


def _taught(
    settings: Settings, whole: model.Model, made: latent_cache.Encoded, device: Any
) -> tuple[latent_cache.Encoded, Any]:
    """The network without quantization as a teacher, and the data with what it is told; None where there is none."""
    if not settings.distillation:
        return made, None
    if settings.model.quant is not None:
        from ..loading.loader import load

        pipe = load(replace(settings.model, quant=None, components=None, skip=()))
        made, teacher = latent_cache.with_teacher(made, pipe, settings, device), getattr(pipe, whole.main)
    else:
        teacher = copy.deepcopy(whole.net)
        if whole.floats:
            with whole.as_it_was():
                made = latent_cache.with_teacher(made, whole.pipe, settings, device)
    return made, teacher.eval().requires_grad_(False).to(device)


def _tell_guidance(settings: Settings, whole: model.Model) -> None:
    """Name keys of a guidance that the network has no input for."""
    if getattr(pipeline_types.net_config(whole.net), "guidance_embeds", False):
        return
    for name in ("guidance_min", "guidance_max"):
        if getattr(settings, name) != key(name).default:
            log.warning("%s has no effect here: a %s has no guidance input", name, type(whole.net).__name__)


def _require_space(job: loop.Job) -> None:
    """Raise DiskSpaceError now if there is no room for the checkpoints that are kept, one more, and the model."""
    from ..utils.atomic_write import require_space
    from . import loop

    if job.accelerator.is_main_process:
        weights = sum(row.nbytes for row in trainable.state_of(job.bare).values())
        count = job.settings.checkpoints_to_keep + 1
        require_space(job.settings.folder / "checkpoints", count * loop.bytes_of(job) + 2 * weights)


@contextmanager
def _bar(settings: Settings, job: loop.Job, *, shown: bool) -> Iterator[Any]:
    from tqdm import tqdm

    hidden = not (shown and settings.progress)
    with tqdm(
        total=settings.max_train_steps, initial=job.step, desc="Training", unit="step", disable=hidden, smoothing=0.05
    ) as bar:
        yield bar


def _after_each(job: loop.Job, pipe: Any, bar: Any, *, shown: bool) -> Callable[[metrics_log.Line], None]:
    """What is done after each step: the bar, and a sheet of pictures when one is due."""
    settings = job.settings

    def each(line: metrics_log.Line) -> None:
        bar.update()
        bar.set_postfix(loss=f"{line.loss:.4f}", lr=f"{line.lr:.1e}", refresh=False)
        due = settings.sample_every and line.step % settings.sample_every == 0
        if due and shown:
            with _averaged(job):
                _draw_samples(job, pipe, job.bare)
        if due:
            job.accelerator.wait_for_everyone()

    return each


@contextmanager
def _averaged(job: loop.Job) -> Iterator[None]:
    """The averaged weights in the place of the last ones, if there are any."""
    if job.ema is None:
        yield
        return
    job.ema.store(job.learning)
    job.ema.copy_to(job.learning)
    try:
        yield
    finally:
        job.ema.restore(job.learning)


def _draw_samples(job: loop.Job, pipe: Any, net: Any) -> None:
    from ..utils import images as pictures

    settings = job.settings
    prompts = settings.sample_prompts or job.data.prompts[1 : PROMPTS + 1] or ("",)
    drawn = samples.draw(
        pipe, net, prompts, steps=settings.sample_steps, seed=settings.seed, device=job.accelerator.device
    )
    title = f"{settings.run_name}, step {job.step}"
    under = f"{settings.sample_steps} denoising steps, seeds from {settings.seed} on"
    made = samples.sheet(drawn, prompts, title, under)
    pictures.save(made, settings.folder / "samples" / f"step-{job.step}.png")


def _draw_curve(settings: Settings, lines: list[metrics_log.Line]) -> None:
    from ..utils import images as pictures

    pictures.save(metrics_log.curve(lines, f"Loss of {settings.run_name}"), settings.folder / "loss.png")


def _stop(settings: Settings, step: int, interrupts: Interrupts) -> None:
    """Say how to go on, and let the signal do what it does. (In other processes than its own: end with an error.)"""
    log.warning("stopped after step %d, which is saved; continue with resume=latest", step)
    seen = interrupts.seen or signal.SIGINT
    interrupts.__exit__()
    signal.raise_signal(seen)
    raise KeyboardInterrupt


def _place(settings: Settings) -> Path:
    return settings.folder / ("lora" if settings.lora_rank else "model")


def _finish(job: loop.Job, whole: model.Model) -> Path:
    """The last sheet of pictures, and the trained model."""
    from ..models.components import quiet
    from ..saving.model_files import save

    target, net, pipe = _place(job.settings), job.bare.to("cpu"), whole.pipe
    if job.ema is not None:
        job.ema.to("cpu")
        job.ema.copy_to(job.learning)
    _draw_samples(job, pipe, net)
    if job.settings.lora_rank:
        return trainable.save_lora(pipe, target)
    whole.restore()
    with quiet():  # diffusers tells of modules to keep in float32 and names none
        setattr(pipe, whole.main, trainable.finished(whole.net, net, whole.dtype))
        pipe.to(whole.dtype)
    return save(pipe, target, overwrite=True)


def _summary(
    job: loop.Job, kept: metrics_log.Log | None, target: Path, *, begun: int, weights: int, seconds: float
) -> Summary:
    lines = kept.lines if kept is not None else metrics_log.read(job.settings.folder / "log.jsonl")
    losses = [line.loss for line in lines]
    folder = job.settings.folder
    return Summary(
        first=job.accelerator.is_main_process,
        folder=str(folder),
        model=str(target),
        steps=job.step,
        begun=begun,
        examples=len(job.data.latents),
        weights=weights,
        first_loss=losses[0],
        loss=metrics_log.smoothed(losses)[-1],
        seconds=round(seconds, 2),
        processes=job.accelerator.num_processes,
        checkpoints=tuple(str(row.path) for row in checkpoints.found(folder / "checkpoints")),
        pictures=tuple(map(str, [folder / "loss.png", *sorted((folder / "samples").glob("step-*.png"))])),
    )

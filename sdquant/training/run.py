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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..request import DTYPES
from . import checkpoints, data, encoded, families, network, objectives, record, samples
from .interrupts import Interrupts

if TYPE_CHECKING:
    from ..formats.source import Source
    from . import loop
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
        first_loss: of the first step. loss: the running mean at the end. seconds: of this session.
        pictures: the curve and the sheets.
    """

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


def train(settings: Settings) -> Summary:
    """Train as asked.

    Raises:
        SdquantError: one of its kinds: data or model cannot be trained on, a checkpoint cannot be gone on from, the
            loss is not finite, there is no room. KeyboardInterrupt, or what SIGTERM does: after a checkpoint.
    """
    begin = time.perf_counter()
    checkpoint = checkpoints.choose(settings.folder / "checkpoints", settings.resume)
    rows = data.examples(settings)
    with _accelerator(settings) as accelerator, Interrupts() as interrupts:
        pipe, dtype = _loaded(settings)
        original = _main(pipe)
        family = families.of(pipe)
        objective = objectives.of(pipe, family, _teacher(settings, original, accelerator.device))
        made = encoded.encode(pipe, rows, settings, accelerator.device)
        net = network.trainable(original, settings)
        from . import loop

        job = loop.prepare(accelerator, settings, net, objective, made)
        _require_space(job)
        if checkpoint is not None:
            loop.resume(job, checkpoint)
        begun, count = job.step, sum(row.numel() for row in job.learning)
        first = accelerator.is_main_process
        if first:
            _write_text(settings.folder / "config.yml", settings.text())
        kept = record.Log(settings.folder / "log.jsonl", job.step) if first else None
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
        model = _finish(job, pipe, original, dtype) if first else _place(settings)
        accelerator.wait_for_everyone()
        return _summary(job, kept, model, begun=begun, weights=count, seconds=time.perf_counter() - begin)


@contextmanager
def _accelerator(settings: Settings) -> Iterator[Any]:
    """accelerate's engine for one training; what it keeps in the process goes at the end."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    made = Accelerator(
        mixed_precision=settings.mixed_precision,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        step_scheduler_with_optimizer=False,  # or it would step once for each process
    )
    known = ("NO", "MULTI_CPU", "MULTI_GPU")
    try:
        if made.distributed_type.value not in known:
            raise SettingsError(
                f"A training with accelerate's {made.distributed_type.value} was asked for",
                f"only {', '.join(known)} are known here", "Change it with: accelerate config",
            )  # fmt: skip
        yield made
    finally:
        made.free_memory()
        AcceleratorState._reset_state()


def _loaded(settings: Settings) -> tuple[Any, Any]:
    """The pipeline in float32, and the dtype that its network has on disk.

    Raises:
        SettingsError: no pipeline, or one whose weights are quantized already and that no LoRA is asked for.
    """
    from .. import demo
    from ..components import dtype_named
    from ..detection import MAIN
    from ..loader import load_model
    from ..preparation import prepare
    from ..request import request
    from ..weights import quantized

    path = settings.pretrained_model_name_or_path
    if path in demo.MODELS and not Path(path).exists():
        path = str(demo.path(path))
    seen = prepare(request(path)).detected
    main = next((name for name in MAIN if name in seen.sources), None)
    if main is None or not seen.parts:
        raise SettingsError(f"{path} was to be trained", "it is no whole pipeline", "Give a pipeline's folder")
    asked: dict[str, Any] = {"components": (main,)} if settings.quantization else {}
    pipe = load_model(
        path, settings.quantization or None, dtype="float32", device="cpu", progress=settings.progress, **asked
    )
    if not settings.lora_rank and any(True for _ in quantized(_main(pipe))):
        raise SettingsError(
            f"{path} was to be trained", "its weights are quantized, and only a LoRA on them can be trained",
            "Set lora_rank, or give the model with float weights",
        )  # fmt: skip
    return pipe, dtype_named(_dtype(seen.sources[main]))


def _dtype(src: Source) -> str:
    """The float dtype with the most bytes in a component's files."""
    sizes: Counter[str] = Counter({"float32": 0})
    for info in src.plain.values():
        if info.dtype in DTYPES:
            sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0]


def _main(pipe: Any) -> Any:
    from ..components import main_part

    return main_part(pipe)


def _teacher(settings: Settings, original: Any, device: Any) -> Any:
    """The network as it is now, or as it is without quantization; None where nothing is learnt from it."""
    if not settings.distillation:
        return None
    if not settings.quantization:
        teacher = copy.deepcopy(original)
    else:
        from ..loader import load_model

        whole = load_model(settings.pretrained_model_name_or_path, dtype="float32", device="cpu", progress=False)
        teacher = _main(whole)
    return teacher.eval().requires_grad_(False).to(device)


def _require_space(job: loop.Job) -> None:
    """Raise DiskSpaceError now if there is no room for the checkpoints that are kept, one more, and the model."""
    from ..writing import require_space
    from . import loop

    if job.accelerator.is_main_process:
        weights = sum(row.nbytes for row in network.state_of(job.bare).values())
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


def _after_each(job: loop.Job, pipe: Any, bar: Any, *, shown: bool) -> Callable[[record.Line], None]:
    """What is done after each step: the bar, and a sheet of pictures when one is due."""
    settings = job.settings

    def each(line: record.Line) -> None:
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
    from .. import pictures

    settings = job.settings
    prompts = settings.sample_prompts or job.data.prompts[1 : PROMPTS + 1] or ("",)
    drawn = samples.draw(
        pipe, net, prompts, steps=settings.sample_steps, seed=settings.seed, device=job.accelerator.device
    )
    title = f"{settings.run_name}, step {job.step}"
    under = f"{settings.sample_steps} denoising steps, seeds from {settings.seed} on"
    made = samples.sheet(drawn, prompts, title, under)
    pictures.save(made, settings.folder / "samples" / f"step-{job.step}.png")


def _draw_curve(settings: Settings, lines: list[record.Line]) -> None:
    from .. import pictures

    pictures.save(record.curve(lines, f"Loss of {settings.run_name}"), settings.folder / "loss.png")


def _stop(settings: Settings, step: int, interrupts: Interrupts) -> None:
    """Say how to go on, and let the signal do what it does. (In other processes than its own: end with an error.)"""
    log.warning("stopped after step %d, which is kept; go on with resume=latest", step)
    seen = interrupts.seen or signal.SIGINT
    interrupts.__exit__()
    signal.raise_signal(seen)
    raise KeyboardInterrupt


def _place(settings: Settings) -> Path:
    return settings.folder / ("lora" if settings.lora_rank else "model")


def _finish(job: loop.Job, pipe: Any, original: Any, dtype: Any) -> Path:
    """The last sheet of pictures, and the trained model."""
    from ..components import quiet
    from ..detection import MAIN
    from ..saving import save

    target, net = _place(job.settings), job.bare.to("cpu")
    if job.ema is not None:
        job.ema.to("cpu")
        job.ema.copy_to(job.learning)
    job.net.eval()
    _draw_samples(job, pipe, net)
    if job.settings.lora_rank:
        return network.save_lora(pipe, net, target)
    name = next(name for name in MAIN if name in pipe.components)
    with quiet():  # diffusers tells of modules to keep in float32 and names none
        setattr(pipe, name, network.finished(original, net, dtype))
        pipe.to(dtype)
    return save(pipe, target, overwrite=True)


def _write_text(path: Path, text: str) -> None:
    from ..writing import whole_file

    with whole_file(path) as file:
        file.write(text.encode())


def _summary(
    job: loop.Job, kept: record.Log | None, model: Path, *, begun: int, weights: int, seconds: float
) -> Summary:
    lines = kept.lines if kept is not None else record.read(job.settings.folder / "log.jsonl")
    losses = [line.loss for line in lines]
    folder = job.settings.folder
    return Summary(
        folder=str(folder),
        model=str(model),
        steps=job.step,
        begun=begun,
        examples=len(job.data.latents),
        weights=weights,
        first_loss=losses[0],
        loss=record.smoothed(losses)[-1],
        seconds=round(seconds, 2),
        processes=job.accelerator.num_processes,
        checkpoints=tuple(str(row.path) for row in checkpoints.found(folder / "checkpoints")),
        pictures=tuple(map(str, [folder / "loss.png", *sorted((folder / "samples").glob("step-*.png"))])),
    )

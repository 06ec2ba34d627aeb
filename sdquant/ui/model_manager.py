"""The one model in memory, shared by all open pages: loads, switches and runs it, one job at a time.

No gradio here. Each page waits for one job, which reports its progress and can be cancelled, even while it waits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SdquantError
from ..models import Lora, LoraSet, StartImage, Stopped

if TYPE_CHECKING:
    from ..planning import Plan, Request

log = logging.getLogger(__name__)

_POLL = 0.05  # seconds between looks at whether a waiting job was cancelled


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a job. `stage`: "waiting" (for another page's job), "loading" (bytes) or "drawing" (steps)."""

    stage: str
    done: int = 0
    total: int = 0


class Job:
    """A job that one page waits for. `tell` is called from the worker thread."""

    def __init__(self, tell: Callable[[Progress], None] | None = None) -> None:
        self._tell, self._cancelled = tell, threading.Event()

    def cancel(self) -> None:
        """Request the job to stop, which it does at its next step."""
        self._cancelled.set()

    def at(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Report the progress of the job.

        Raises:
            Stopped: the job was cancelled.
        """
        if self._cancelled.is_set():
            raise Stopped
        if self._tell is not None:
            self._tell(Progress(stage=stage, done=done, total=total))


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The settings of images; None is the model's default. `count`: images, each from the seed after the last one's."""

    prompt: str
    steps: int
    seed: int
    guidance: float | None = None
    width: int | None = None
    height: int | None = None
    negative: str = ""
    sampler: str | None = None
    count: int = 1
    loras: tuple[Lora, ...] = ()
    start: StartImage | None = field(default=None, repr=False)

    @property
    def seeds(self) -> list[int]:
        """Return the seed of each image."""
        return [self.seed + number for number in range(self.count)]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The model in memory.

    Attributes:
        pipe: the pipeline. asked, plan: the request and the plan that it was loaded with.
        seconds: duration of the load.
        bytes: size of its weights, summed over the loaded tensors.
        stamps: size and modification time (ns) of its files, from before they were read.
        loras: the LoRAs that are on it.
    """

    pipe: Any = field(repr=False)
    asked: Request
    plan: Plan = field(repr=False)
    seconds: float
    bytes: int
    stamps: Mapping[Path, tuple[int, int]] = field(repr=False)
    loras: LoraSet = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class GeneratedImage:
    """Images, and the model and settings that it was drawn with.

    Attributes:
        seconds: duration of the drawing, without the load.
        peak: peak size of the weights on the compute device since the load, in bytes.
        switched: whether the model was loaded for this image.
    """

    images: list[Any] = field(repr=False)
    held: LoadedModel
    drawing: Drawing
    seconds: float
    peak: int
    switched: bool

    @property
    def image(self) -> Any:
        """Return the first image."""
        return self.images[0]


class Engine:
    """Holds at most one model; two only during a switch, if both fit."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._held: LoadedModel | None = None

    @property
    def held(self) -> LoadedModel | None:
        """Return the model in memory."""
        return self._held

    def load(self, request: Request, job: Job | None = None, *, then: Callable[[], None] | None = None) -> LoadedModel:
        """Load a model, unless it is the one in memory. On failure the previous model stays loaded.

        Args:
            then: called when it is loaded, before another job has its turn.

        Raises:
            SdquantError: it cannot be loaded. Stopped: the job was cancelled.
        """
        job = job or Job()
        with self._mine(job):
            model = self._switch(request, job)
            if then is not None:
                then()
            return model

    def draw(self, request: Request, drawing: Drawing, job: Job | None = None) -> GeneratedImage:
        """Draw an image with a model, which is loaded first if it is not the one in memory.

        Raises:
            SdquantError: the model cannot be loaded, or cannot draw the image. Stopped: the job was cancelled.
        """
        from ..models import draw, pipeline_for, sampling_with

        job = job or Job()
        with self._mine(job):
            before = self._held
            model = self._switch(request, job)
            begin = time.perf_counter()
            with _sentences(f"Cannot generate with {request.path}"), ExitStack() as sampling:
                model.loras.use(drawing.loras)
                pipe = pipeline_for(model.pipe, drawing.start)
                sampling.enter_context(sampling_with(pipe, drawing.sampler))
                images = draw(
                    pipe,
                    [drawing.prompt] * drawing.count,
                    start=drawing.start,
                    seeds=drawing.seeds,
                    negative=drawing.negative,
                    batch=drawing.count,
                    steps=drawing.steps,
                    guidance=drawing.guidance,
                    width=drawing.width,
                    height=drawing.height,
                    on_step=lambda done, total: job.at("drawing", done, total),
                )
            return GeneratedImage(
                images=images,
                held=model,
                drawing=drawing,
                seconds=time.perf_counter() - begin,
                peak=model.pipe.sdquant.offload.report()["peak"] or model.bytes,
                switched=model is not before,
            )

    def unload(self, job: Job | None = None) -> None:
        """Unload the model and free its memory."""
        with self._mine(job or Job()):
            self._drop()

    @contextmanager
    def alone(self, job: Job) -> Iterator[None]:
        """Reserve the machine for a job that loads models itself. The loaded model stays, or comes back at the end if
        there is no room beside it for one of its size before quantization, which such jobs load."""
        with self._mine(job):
            before = self._held
            if before is None or _both_fit(before.plan, sum(part.bytes_bf16 for part in before.plan.components)):
                yield
                return
            request = before.asked
            del before
            self._drop()
            try:
                yield
            finally:
                try:
                    self._switch(request, Job())
                except SdquantError as error:
                    log.warning("the model that was loaded before cannot be loaded again: %s", error)

    @contextmanager
    def _mine(self, job: Job) -> Iterator[None]:
        while not self._turn.acquire(timeout=_POLL):
            job.at("waiting")
        try:
            yield
        finally:
            self._turn.release()

    def _switch(self, request: Request, job: Job) -> LoadedModel:
        from ..loading import load_planned
        from ..models import weight_bytes
        from ..planning import prepare
        from ..utils.buffers import give_back

        if self._held is not None and self._held.asked == request and not _changed(self._held):
            return self._held
        plan = prepare(request, on_weights=lambda done, total: job.at("reading the weights", done, total))
        stamps = _stamps(plan)
        job.at("loading", 0, plan.bytes)
        before = self._held.asked if self._held is not None else None
        if before is not None and not _both_fit(plan):
            self._drop()
        begin = time.perf_counter()
        try:
            with _sentences(f"Cannot load {request.path}"):
                pipe = load_planned(request, plan, on_bytes=lambda done, total: job.at("loading", done, total))
        except BaseException:
            give_back()
            if self._held is None and before is not None:
                self._switch(before, Job())
            raise
        seconds = time.perf_counter() - begin
        self._held = LoadedModel(
            pipe=pipe,
            asked=request,
            plan=plan,
            seconds=seconds,
            bytes=weight_bytes(pipe),
            stamps=stamps,
            loras=LoraSet(pipe),
        )
        give_back()
        return self._held

    def _drop(self) -> None:
        from ..utils.buffers import give_back

        self._held = None
        give_back()


def _stamps(plan: Plan) -> dict[Path, tuple[int, int]]:
    """Return size and modification time (ns) of the files that a plan reads, as far as they exist."""
    stamps = {}
    for path in {file for src in plan.detected.sources.values() for file in src.files}:
        try:
            stat = os.stat(path)
        except OSError:
            continue
        stamps[path] = (stat.st_size, stat.st_mtime_ns)
    return stamps


def _changed(model: LoadedModel) -> bool:
    """Return whether a file of the model has changed. A deleted one does not count: its weights are in memory."""
    now = _stamps(model.plan)
    return any(now[path] != stamp for path, stamp in model.stamps.items() if path in now)


def _both_fit(plan: Plan, nbytes: int = 0) -> bool:
    """Return whether the model of a plan, or one of `nbytes` if that is more, fits next to the one in memory, with room
    to spare."""
    from ..compat import hardware

    here = hardware.probe()
    device = next((row for row in here.devices if row.torch_name == plan.device), here.best)
    free = min(here.ram_available, device.memory_free if device.memory_free is not None else 0)
    return 2 * max(plan.bytes, nbytes) < free


@contextmanager
def _sentences(what: str) -> Iterator[None]:
    """Turn errors of torch and other libraries, such as out of memory, into an SdquantError with a fix."""
    try:
        yield
    except (SdquantError, Stopped):
        raise
    except Exception as error:
        log.exception("%s", what)
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        memory = isinstance(error, MemoryError) or "out of memory" in text.lower()
        fix = (
            "Choose a smaller scheme, balanced offload, or a smaller image"
            if memory
            else "See the server's log for the full error, or try another scheme or offload mode"
        )
        raise SdquantError(what, "there is not enough memory" if memory else text, fix) from error

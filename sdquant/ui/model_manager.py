"""The one model in memory, shared by all open pages: loaded, switched, drawn with, one job at a time.

No gradio here. A job is what one page waits for; it tells of its progress and can be cancelled, also while it waits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SdquantError
from ..models.generate import Stopped

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..planning.request import Request

log = logging.getLogger(__name__)

_POLL = 0.05  # seconds between looks at whether a waiting job was cancelled


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a job is. `stage`: "waiting" (for another page's job), "loading" (bytes) or "drawing" (steps)."""

    stage: str
    done: int = 0
    total: int = 0


class Job:
    """What one page waits for. `tell` is called from the working thread."""

    def __init__(self, tell: Callable[[Progress], None] | None = None) -> None:
        self._tell, self._cancelled = tell, threading.Event()

    def cancel(self) -> None:
        """Ask the job to stop: it does at its next step."""
        self._cancelled.set()

    def at(self, stage: str, done: int = 0, total: int = 0) -> None:
        """Say where the job is.

        Raises:
            Stopped: it was cancelled.
        """
        if self._cancelled.is_set():
            raise Stopped
        if self._tell is not None:
            self._tell(Progress(stage=stage, done=done, total=total))


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What is to be drawn; None leaves it to the model."""

    prompt: str
    steps: int
    seed: int
    guidance: float | None = None
    width: int | None = None
    height: int | None = None


@dataclass(frozen=True, kw_only=True)
class Held:
    """The model in memory.

    Attributes:
        pipe: the pipeline. asked, plan: what it was made of.
        seconds: that the load took.
        bytes: of its weights, counted from the loaded tensors.
        stamps: its files with size and time of change, from before they were read.
    """

    pipe: Any = field(repr=False)
    asked: Request
    plan: Plan = field(repr=False)
    seconds: float
    bytes: int
    stamps: Mapping[Path, tuple[int, int]] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """An image, and what drew it.

    Attributes:
        seconds: of the drawing alone.
        peak: bytes of weights on the compute device at most, since the load.
        switched: whether the model was loaded for it.
    """

    image: Any = field(repr=False)
    held: Held
    drawing: Drawing
    seconds: float
    peak: int
    switched: bool


class Engine:
    """Holds at most one model, but for the moment of a switch where both fit."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._held: Held | None = None

    @property
    def held(self) -> Held | None:
        """The model in memory now."""
        return self._held

    def load(self, asked: Request, job: Job | None = None, *, then: Callable[[], None] | None = None) -> Held:
        """Make `asked` the model in memory. Where that fails, the one that was there is there still.

        Args:
            then: called when it is loaded, before another job has its turn.

        Raises:
            SdquantError: it cannot be loaded. Stopped: the job was cancelled.
        """
        job = job or Job()
        with self._mine(job):
            held = self._switch(asked, job)
            if then is not None:
                then()
            return held

    def draw(self, asked: Request, drawing: Drawing, job: Job | None = None) -> Drawn:
        """Draw with the model that `asked` says, which is loaded first if it is not the one in memory.

        Raises:
            SdquantError: it cannot be loaded, or cannot draw that. Stopped: the job was cancelled.
        """
        from ..models.generate import draw

        job = job or Job()
        with self._mine(job):
            before = self._held
            held = self._switch(asked, job)
            begin = time.perf_counter()
            with _sentences(f"Cannot draw with {asked.path}"):
                (image,) = draw(
                    held.pipe,
                    [drawing.prompt],
                    seeds=[drawing.seed],
                    steps=drawing.steps,
                    guidance=drawing.guidance,
                    width=drawing.width,
                    height=drawing.height,
                    on_step=lambda done, total: job.at("drawing", done, total),
                )
            return Drawn(
                image=image,
                held=held,
                drawing=drawing,
                seconds=time.perf_counter() - begin,
                peak=held.pipe.sdquant.offload.report()["peak"] or held.bytes,
                switched=held is not before,
            )

    def unload(self, job: Job | None = None) -> None:
        """Give the model's memory back."""
        with self._mine(job or Job()):
            self._drop()

    @contextmanager
    def alone(self, job: Job) -> Iterator[None]:
        """The machine for one job that loads models by itself: what is held is unloaded first."""
        with self._mine(job):
            self._drop()
            yield

    @contextmanager
    def _mine(self, job: Job) -> Iterator[None]:
        while not self._turn.acquire(timeout=_POLL):
            job.at("waiting")
        try:
            yield
        finally:
            self._turn.release()

    def _switch(self, asked: Request, job: Job) -> Held:
        from ..loading.loader import load_planned
        from ..models.pipelines import weight_bytes
        from ..planning.preparation import prepare
        from ..utils.buffers import give_back

        if self._held is not None and self._held.asked == asked and not _changed(self._held):
            return self._held
        made = prepare(asked)
        stamps = _stamps(made)
        job.at("loading", 0, made.bytes)
        before = self._held.asked if self._held is not None else None
        if before is not None and not _both_fit(made):
            self._drop()
        begin = time.perf_counter()
        try:
            with _sentences(f"Cannot load {asked.path}"):
                pipe = load_planned(asked, made, on_bytes=lambda done, total: job.at("loading", done, total))
        except BaseException:
            give_back()
            if self._held is None and before is not None:
                self._switch(before, Job())
            raise
        seconds = time.perf_counter() - begin
        self._held = Held(pipe=pipe, asked=asked, plan=made, seconds=seconds, bytes=weight_bytes(pipe), stamps=stamps)
        give_back()
        return self._held

    def _drop(self) -> None:
        from ..utils.buffers import give_back

        self._held = None
        give_back()


def _stamps(made: Plan) -> dict[Path, tuple[int, int]]:
    """Size and time of change of the files that a plan reads, of those that are there."""
    found = {}
    for path in {file for src in made.detected.sources.values() for file in src.files}:
        try:
            stat = os.stat(path)
        except OSError:
            continue
        found[path] = (stat.st_size, stat.st_mtime_ns)
    return found


def _changed(held: Held) -> bool:
    """Whether a file of the model is another now. One that is gone changes nothing: its weights are in memory."""
    now = _stamps(held.plan)
    return any(now[path] != stamp for path, stamp in held.stamps.items() if path in now)


def _both_fit(made: Plan) -> bool:
    """Whether the model of this plan fits beside the one in memory, with room to spare."""
    from ..compat import hardware

    here = hardware.probe()
    device = next((row for row in here.devices if row.torch_name == made.device), here.best)
    free = min(here.ram_available, device.memory_free if device.memory_free is not None else 0)
    return 2 * made.bytes < free


@contextmanager
def _sentences(what: str) -> Iterator[None]:
    """Errors of torch and the libraries, out of memory above all, as an SdquantError that says what to do."""
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

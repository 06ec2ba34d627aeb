"""Run a job in a thread, and report it to a page: its progress, then the result or the error."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SdquantError
from ..models import Stopped
from .model_manager import Job, Progress

if TYPE_CHECKING:
    from .app_state import Desk

log = logging.getLogger(__name__)

_EVERY = 0.15  # seconds between two looks at the progress: pages are not drawn more often


@dataclass(frozen=True)
class Done:
    """The end of a job. `error` is None if it succeeded."""

    value: Any = None
    error: BaseException | None = None


def follow(desk: Desk, page: str, work: Callable[[Job], Any]) -> Iterator[Progress | Done]:
    """Run `work` in a thread of its own; yield the newest `Progress` from time to time, and `Done` at the end.

    If the page is closed before the end, the job is cancelled.
    """
    reports: queue.SimpleQueue[Progress] = queue.SimpleQueue()
    job = Job(reports.put)
    ended: queue.SimpleQueue[Done] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put(Done(value=work(job)))
        except (SdquantError, Stopped) as error:
            ended.put(Done(error=error))
        except BaseException as error:  # the page says it in a line
            log.exception("a job of the page failed")
            ended.put(Done(error=error))

    desk.begin(page, job)
    thread = threading.Thread(target=run, name="sdquant-job", daemon=True)
    thread.start()
    try:
        while True:
            try:
                done = ended.get(timeout=_EVERY)
            except queue.Empty:
                newest = _newest(reports)
                if newest is not None:
                    yield newest
                continue
            thread.join()
            yield done
            return
    finally:
        job.cancel()
        desk.end(page, job)


def _newest(reports: queue.SimpleQueue[Progress]) -> Progress | None:
    newest = None
    while True:
        try:
            newest = reports.get_nowait()
        except queue.Empty:
            return newest

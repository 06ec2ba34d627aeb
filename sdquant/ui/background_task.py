"""Run a job in a thread, and report it to a page: its progress, then the result or the error."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SdquantError
from ..models import Stopped
from .model_manager import Job, Progress

if TYPE_CHECKING:
    from .app_state import Desk

log = logging.getLogger(__name__)

_RUNNING: dict[threading.Thread, Job] = {}
_EVERY = 0.15  # seconds between two looks at the progress: pages are not drawn more often


@dataclass(frozen=True)
class Done:
    """The end of a job. `error` is None if it succeeded."""

    value: Any = None
    error: BaseException | None = None


def follow(desk: Desk, page: str, work: Callable[[Job], Any]) -> Iterator[Progress | Done]:
    """Run `work` in a thread of its own; yield the newest `Progress` from time to time, and `Done` at the end.

    Args:
        page: an open page and its tab, by `app_state.waiter`.

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
        finally:
            _RUNNING.pop(threading.current_thread(), None)

    desk.begin(page, job)
    thread = threading.Thread(target=run, name="sdquant-job", daemon=True)
    _RUNNING[thread] = job
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


def cancel_all() -> None:
    """Request the jobs of all pages to stop, which they do at their next steps."""
    for job in list(_RUNNING.values()):
        job.cancel()


def wait_for_all(seconds: float) -> None:
    """Wait until all jobs have ended, but no longer than so many seconds."""
    until = time.monotonic() + seconds
    for thread in list(_RUNNING):
        thread.join(max(0.0, until - time.monotonic()))


def _newest(reports: queue.SimpleQueue[Progress]) -> Progress | None:
    newest = None
    while True:
        try:
            newest = reports.get_nowait()
        except queue.Empty:
            return newest

"""Run a job in a thread, and report it to the pages that follow it: its progress, then the result or the error.

A job goes on when its page has gone: whoever reloads the page, or opens another in the same browser, follows it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import SdquantError
from ..models import Stopped
from .model_manager import Job, Progress

log = logging.getLogger(__name__)

_RUNNING: dict[threading.Thread, Task] = {}
_EVERY = 0.15  # seconds between two looks at the progress: pages are not drawn more often
_KEPT = 2  # tasks whose end is kept, for a page that was reloaded meanwhile
_RECENT = 60.0  # seconds for which it is


@dataclass(frozen=True)
class Done:
    """The end of a job. `error` is None if it succeeded."""

    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """Who looks at a page: random names of the browser, and of its window or tab, which a reload does not change."""

    browser: str
    window: str


class Task:
    """A job in a thread of its own.

    Attributes:
        show: makes of a `Progress` and of `Done` what a page shows. newest: the last progress. done: the end.
        tab, visitor: where it was begun. pages: those that follow it, by `app_state.waiter`.
    """

    def __init__(self, work: Callable[[Job], Any], show: Callable[[Progress | Done], Any]) -> None:
        self.job, self.show = Job(self._hear), show
        self.newest: Progress | None = None
        self.done: Done | None = None
        self.tab = ""
        self.visitor: Visitor | None = None
        self.pages: set[str] = set()
        self.ended = threading.Event()
        self.ended_at = 0.0
        self._work = work

    def start(self) -> None:
        """Begin the work in a thread."""
        thread = threading.Thread(target=self._run, name="sdquant-job", daemon=True)
        _RUNNING[thread] = self
        thread.start()

    def _hear(self, progress: Progress) -> None:
        self.newest = progress

    def _run(self) -> None:
        try:
            self.done = Done(value=self._work(self.job))
        except (SdquantError, Stopped) as error:
            self.done = Done(error=error)
        except BaseException as error:  # the page says it in a line
            log.exception("a job of the page failed")
            self.done = Done(error=error)
        finally:
            self.ended_at = time.monotonic()
            _RUNNING.pop(threading.current_thread(), None)
            self.ended.set()


class TaskList:
    """The tasks of all pages of one server: one at a time for each tab of a page, which ends no other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: list[Task] = []
        self._visitors: dict[str, Visitor] = {}

    def begin(self, page: str, task: Task) -> Task:
        """Start `task` for a page; if one is under way there, return that one instead.

        Args:
            page: an open page and its tab, by `app_state.waiter`: a drawing is no conversion's business.
        """
        session, _, tab = page.partition(" ")
        with self._lock:
            running = next((one for one in self._tasks if page in one.pages and one.done is None), None)
            if running is not None:
                return running
            task.tab, task.visitor = tab, self._visitors.get(session)
            task.pages.add(page)
            self._tasks.append(task)
        task.start()
        return task

    def arrive(self, session: str, visitor: Visitor, tabs: tuple[str, ...]) -> dict[str, Task]:
        """Make a page that was opened follow what was begun in its window, or in a page of its browser that has gone.

        Returns:
            The task of each tab that has one.
        """
        tasks: dict[str, Task] = {}
        with self._lock:
            self._visitors[session] = visitor
            for task in self._tasks:
                if task.tab in tabs and _is_of(task, visitor):
                    tasks[task.tab] = task
            for tab, task in tasks.items():
                task.pages.add(f"{session} {tab}")
        return tasks

    def followed(self, page: str) -> Task | None:
        """Return the newest task that a page follows."""
        with self._lock:
            return next((one for one in reversed(self._tasks) if page in one.pages), None)

    def leave(self, page: str, task: Task) -> None:
        """Note that a page follows a task no longer. Of one that nobody could find again, the job is cancelled."""
        with self._lock:
            task.pages.discard(page)
            over = [one for one in self._tasks if one.done is not None and not one.pages]
            for one in over[: max(0, len(over) - _KEPT)]:
                self._tasks.remove(one)
        if task.visitor is None and not task.pages:
            task.job.cancel()

    def forget(self, session: str) -> None:
        """Note that a page was closed."""
        with self._lock:
            self._visitors.pop(session, None)
            left = [(page, one) for one in self._tasks for page in one.pages if page.partition(" ")[0] == session]
        for page, task in left:
            self.leave(page, task)

    def is_busy(self, page: str) -> bool:
        """Return whether `page` waits for a job."""
        with self._lock:
            return any(page in one.pages and one.done is None for one in self._tasks)

    def cancel(self, page: str) -> None:
        """Cancel the job that `page` waits for."""
        with self._lock:
            tasks = [one for one in self._tasks if page in one.pages]
        for task in tasks:
            task.job.cancel()


def _is_of(task: Task, visitor: Visitor) -> bool:
    """Return whether a page that was opened shows a task: what runs, and what has just ended in the same window."""
    if task.visitor is None or task.visitor.browser != visitor.browser:
        return False
    if task.done is not None:
        return task.visitor.window == visitor.window and time.monotonic() - task.ended_at < _RECENT
    return task.visitor.window == visitor.window or not task.pages


def follow(
    tasks: TaskList, page: str, work: Callable[[Job], Any], show: Callable[[Progress | Done], Any] = lambda event: event
) -> Iterator[Any]:
    """Run `work` in a thread of its own; yield what `show` makes of the newest progress from time to time, and of the
    end. If the page has a task already, yield what that shows.

    Args:
        page: an open page and its tab, by `app_state.waiter`.
    """
    yield from follow_again(tasks, page, tasks.begin(page, Task(work, show)))


def follow_again(tasks: TaskList, page: str, task: Task) -> Iterator[Any]:
    """Yield what a task shows until its end. If the page is closed before that, the job goes on."""
    last = None
    try:
        while not task.ended.wait(_EVERY):
            if task.newest is not last:
                last = task.newest
                yield task.show(last)  # type: ignore[arg-type]
        assert task.done is not None
        yield task.show(task.done)
    finally:
        tasks.leave(page, task)


def cancel_all() -> None:
    """Request the jobs of all pages to stop, which they do at their next steps."""
    for task in list(_RUNNING.values()):
        task.job.cancel()


def wait_for_all(seconds: float) -> None:
    """Wait until all jobs have ended, but no longer than so many seconds."""
    until = time.monotonic() + seconds
    for thread in list(_RUNNING):
        thread.join(max(0.0, until - time.monotonic()))

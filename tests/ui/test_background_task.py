"""Work in a thread, as the pages follow it that began it, were reloaded, or are opened later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

import sdquant
from sdquant.models.generate import Stopped
from sdquant.ui.app_state import waiter
from sdquant.ui.background_task import Done, Task, TaskList, Visitor, follow, follow_again
from sdquant.ui.model_manager import Job, Progress

from ..patience import PATIENCE

MINE = Visitor(browser="firefox", window="first")
TABS = ("generate", "convert")


@pytest.fixture
def tasks() -> TaskList:
    return TaskList()


def working(go: threading.Event) -> Callable[[Job], str]:
    """Work that goes on until it is told to end, or is cancelled."""

    def work(job: Job) -> str:
        job.at("drawing", 1, 2)
        while not go.wait(0.01):
            job.at("drawing", 1, 2)
        return "image"

    return work


def test_progress_then_the_result(tasks: TaskList) -> None:
    go = threading.Event()
    events = follow(tasks, "page", working(go))
    assert next(events) == Progress(stage="drawing", done=1, total=2)
    assert tasks.is_busy("page")
    go.set()
    assert list(events)[-1] == Done(value="image")
    assert not tasks.is_busy("page")


@pytest.mark.parametrize("error", [sdquant.SettingsError("a", "b", "c"), Stopped(), ValueError("of a library")])
def test_errors_come_as_the_end(tasks: TaskList, error: Exception) -> None:
    def work(job: Job) -> None:
        raise error

    assert list(follow(tasks, "page", work)) == [Done(error=error)]


def test_cancel_is_of_its_own_page_and_tab(tasks: TaskList) -> None:
    pages = (waiter("one", "generate"), waiter("one", "convert"), waiter("other", "generate"))
    go = threading.Event()
    events = {page: follow(tasks, page, working(go)) for page in pages}
    for page in pages:
        next(events[page])
    tasks.cancel(waiter("third", "generate"))
    tasks.cancel(pages[0])
    *_, done = events[pages[0]]
    assert isinstance(done.error, Stopped)
    go.set()
    for page in pages[1:]:
        *_, done = events[page]
        assert done == Done(value="image")


def test_a_second_job_ends_no_first(tasks: TaskList) -> None:
    """Whoever starts another on the same tab sees the one that runs."""
    go = threading.Event()
    first = follow(tasks, "page", working(go))
    next(first)
    second = follow(tasks, "page", lambda job: "another")
    next(second)
    go.set()
    assert list(first)[-1] == list(second)[-1] == Done(value="image")


def test_a_job_goes_on_without_its_page(tasks: TaskList) -> None:
    """A reload finds it, while the page before has not gone, too; so does another page of the browser, if it has."""
    go = threading.Event()
    tasks.arrive("before", MINE, TABS)
    before = follow(tasks, waiter("before", "convert"), working(go))
    next(before)
    assert tasks.arrive("stranger", Visitor(browser="chrome", window="first"), TABS) == {}
    assert tasks.arrive("beside", Visitor(browser="firefox", window="second"), TABS) == {}
    (task,) = tasks.arrive("reloaded", MINE, TABS).values()
    page = waiter("reloaded", "convert")
    assert tasks.followed(page) is task and tasks.is_busy(page)
    after = follow_again(tasks, page, task)
    assert next(after).done == 1
    before.close()
    tasks.forget("before")
    after.close()
    tasks.forget("reloaded")
    assert list(tasks.arrive("later", Visitor(browser="firefox", window="third"), TABS)) == ["convert"]
    later = follow_again(tasks, waiter("later", "convert"), task)
    next(later)
    tasks.cancel(waiter("later", "convert"))
    *_, done = later
    assert isinstance(done.error, Stopped)


def test_the_end_is_kept_for_a_reload_and_not_for_long(tasks: TaskList) -> None:
    tasks.arrive("before", MINE, TABS)
    for tab in ("generate", "convert", "generate"):
        list(follow(tasks, waiter("before", tab), lambda job: time.time()))
    assert len(tasks._tasks) == 2
    assert tasks.arrive("beside", Visitor(browser="firefox", window="second"), TABS) == {}
    found = tasks.arrive("reloaded", MINE, TABS)
    assert sorted(found) == ["convert", "generate"]
    assert tasks.followed(waiter("reloaded", "generate")) is found["generate"]
    for task in found.values():
        task.ended_at -= 3600
    assert tasks.arrive("again", MINE, TABS) == {}


def test_a_job_of_nobody_is_cancelled_with_its_page(tasks: TaskList) -> None:
    """A page that closed before it said who looks: nobody could find the job again."""
    events = follow(tasks, "page", working(threading.Event()))
    next(events)
    task = tasks.followed("page")
    assert isinstance(task, Task)
    events.close()
    assert task.ended.wait(PATIENCE)

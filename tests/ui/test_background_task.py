"""Work in a thread, as a page follows it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import sdquant
from sdquant.models.generate import Stopped
from sdquant.ui.app_state import Desk
from sdquant.ui.background_task import Done, follow
from sdquant.ui.model_folders import Roots
from sdquant.ui.model_manager import Job, Progress


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(Roots(), tmp_path / "settings.json")


def test_progress_then_the_result(desk: Desk) -> None:
    go = threading.Event()

    def work(job: Job) -> str:
        job.at("drawing", 1, 2)
        go.wait()
        return "image"

    events = follow(desk, "page", work)
    assert next(events) == Progress(stage="drawing", done=1, total=2)
    go.set()
    assert list(events)[-1] == Done(value="image")


@pytest.mark.parametrize("error", [sdquant.SettingsError("a", "b", "c"), Stopped(), ValueError("of a library")])
def test_errors_come_as_the_end(desk: Desk, error: Exception) -> None:
    def work(job: Job) -> None:
        raise error

    assert list(follow(desk, "page", work)) == [Done(error=error)]


def test_cancel_is_of_its_own_page(desk: Desk) -> None:
    inside = threading.Barrier(3)
    ended: dict[str, object] = {}

    def page(name: str) -> None:
        def work(job: Job) -> str:
            inside.wait()
            for step in range(1000):
                job.at("drawing", step, 1000)
                if name == "other" and "one" in ended:
                    return "whole"
                threading.Event().wait(0.01)
            return "too late"

        (*_, done) = follow(desk, name, work)
        assert isinstance(done, Done)
        ended[name] = done.error if done.error is not None else done.value

    threads = [threading.Thread(target=page, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    inside.wait()
    desk.cancel("one")
    for thread in threads:
        thread.join()
    assert isinstance(ended["one"], Stopped) and ended["other"] == "whole"


def test_a_page_that_goes_away_cancels_its_job(desk: Desk) -> None:
    stopped = threading.Event()

    def work(job: Job) -> None:
        try:
            while True:
                job.at("drawing", 1, 2)
                threading.Event().wait(0.01)
        except Stopped:
            stopped.set()
            raise

    events = follow(desk, "page", work)
    next(events)
    events.close()
    assert stopped.wait(10)


def test_a_second_job_of_a_page_ends_the_first(desk: Desk) -> None:
    first, second = Job(), Job()
    desk.begin("page", first)
    desk.begin("page", second)
    with pytest.raises(Stopped):
        first.at("drawing")
    second.at("drawing")
    desk.end("page", first)  # which is its job no more
    desk.cancel("page")
    with pytest.raises(Stopped):
        second.at("drawing")

"""Which of two implementations is taken, with a clock that is told what it shows."""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest
import torch

from sdquant.kernels import fastest, verdicts

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is known, and what is found is kept in a folder of the test's."""
    monkeypatch.setenv("SDQUANT_SETTINGS", str(tmp_path / "settings.json"))
    monkeypatch.setattr(verdicts, "_new", {})
    verdicts._stored.cache_clear()
    monkeypatch.setattr(fastest, "_verdicts", {})
    monkeypatch.setattr(fastest, "_seen", {})
    monkeypatch.delenv("SDQUANT_TUNE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield
    atexit.unregister(verdicts.write)
    verdicts._stored.cache_clear()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was timed; an implementation returns the seconds it takes."""
    seen: list[float] = []

    def seconds(run: Callable[[], float], device: torch.device) -> float:
        seen.append(run())
        return seen[-1]

    monkeypatch.setattr(fastest, "gpu_seconds", seconds)
    return seen


def choose(usual: float, other: float, rows: int = 300, kind: str = "a", device: torch.device = CARD) -> bool:
    return fastest.prefers_other(kind, rows, device, lambda: usual, lambda: other)


def test_the_faster_one_is_taken_from_then_on(timed: list[float]) -> None:
    assert not choose(1.0, 2.0) and choose(2.0, 1.0, kind="b")
    assert len(timed) == 4
    assert not choose(2.0, 1.0) and choose(1.0, 2.0, kind="b")
    assert len(timed) == 4


def test_each_power_of_two_of_rows_is_measured(timed: list[float]) -> None:
    for rows in (257, 300, 512):
        assert choose(2.0, 1.0, rows)
    assert len(timed) == 2
    assert not choose(1.0, 2.0, 513) and not choose(1.0, 2.0, 256)
    assert len(timed) == 6


def test_nothing_is_measured_where_it_is_not_wanted(timed: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not choose(2.0, 1.0, device=CPU)
    monkeypatch.setenv("SDQUANT_TUNE", "0")
    assert not choose(2.0, 1.0)
    assert timed == []


def test_a_graph_that_is_recorded_does_not_decide(timed: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not choose(2.0, 1.0) and timed == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert choose(2.0, 1.0)


def test_a_graph_that_is_recorded_has_no_more_than_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which callers ask before they compute with the other one."""
    verdicts.keep(CARD, fastest._key("b", 300, CARD)[1:], True)
    verdicts.write()
    assert not fastest.is_settled("a", 300, CARD) and not fastest.is_settled("b", 300, CARD)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert fastest.is_settled("a", 300, CARD) and not fastest.is_settled("b", 300, CARD)
    assert not fastest.is_settled("c", 300, CPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not fastest.is_settled("a", 300, CARD)


def test_one_that_does_not_work_is_not_taken(timed: list[float]) -> None:
    def raises() -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert not fastest.prefers_other("a", 300, CARD, lambda: 1.0, raises)


class Clock:
    """Time that passes while something is computed, and what was computed."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, list[str]()

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, seconds: float) -> Callable[[], str]:
        def run() -> str:
            self.now += seconds
            self.made.append(name)
            return name

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(fastest, "perf_counter", made)
    monkeypatch.setattr(fastest, "thread_time", made)
    monkeypatch.setattr(fastest, "_LONG", 1000.0)
    return made


def compute(clock: Clock, usual: float, other: float, times: int, rows: int = 300) -> list[str]:
    clock.made.clear()
    for _ in range(times):
        result = fastest.by_the_faster("a", rows, clock.work("usual", usual), clock.work("other", other))
        assert result == clock.made[-1]
    return clock.made


@pytest.mark.parametrize(("usual", "other", "taken"), [(2.0, 1.0, "other"), (1.0, 2.0, "usual"), (1.0, 0.98, "usual")])
def test_a_cpu_computes_the_first_products_by_turns(clock: Clock, usual: float, other: float, taken: str) -> None:
    assert compute(clock, usual, other, 10) == ["usual", "other"] * 5
    assert compute(clock, other, usual, 3) == [taken] * 3  # the clock is not asked any more
    assert fastest.is_settled("a", 300, CPU) == (taken == "usual")
    assert compute(clock, usual, other, 2, rows=513) == ["usual", "other"]  # another power of two


def test_two_calls_that_take_long_are_enough(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 4608 rows few programs compute as many as ten."""
    monkeypatch.setattr(fastest, "_LONG", 6.0)
    assert compute(clock, 2.0, 1.0, 6) == ["usual", "other"] * 2 + ["other"] * 2


def test_one_lucky_call_does_not_decide(clock: Clock) -> None:
    """While other programs disturb both, the least of one may be far below that of the other."""
    for turn in range(5):
        compute(clock, 3.0, 1.0 if turn == 2 else 4.0, 2)
    assert compute(clock, 3.0, 1.0, 1) == ["usual"]


def test_one_thread_is_timed_by_its_own_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program that takes the core away is not a slow product."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(fastest, "_HAS_THREAD_TIME", True)
    monkeypatch.setattr(fastest, "perf_counter", lambda: pytest.fail("the time of all programs"))
    assert compute(clock, 2.0, 1.0, 11)[-1] == "other"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(fastest, "perf_counter", clock)
    monkeypatch.setattr(fastest, "thread_time", lambda: pytest.fail("the time of one thread"))
    assert compute(clock, 2.0, 1.0, 11, rows=513)[-1] == "other"


def test_a_cpu_that_is_not_to_be_tuned_takes_the_usual_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDQUANT_TUNE", "0")
    assert compute(clock, 2.0, 1.0, 9) == ["usual"] * 9 and fastest.is_settled("a", 300, CPU)
    verdicts.write()
    assert not verdicts.path().exists()


def test_verdicts_are_kept_for_the_next_run(clock: Clock, timed: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    compute(clock, 2.0, 1.0, 10)
    assert choose(1.0, 2.0) is False and not verdicts.path().exists()
    verdicts.write()
    monkeypatch.setattr(fastest, "_verdicts", {})
    assert compute(clock, 1.0, 2.0, 2) == ["other"] * 2
    assert choose(2.0, 1.0) is False and len(timed) == 2
    monkeypatch.setattr(fastest, "_verdicts", {})
    monkeypatch.setattr(verdicts, "_machine", lambda device: "another")
    assert compute(clock, 1.0, 2.0, 2) == ["usual", "other"]


def test_what_was_measured_is_kept_in_seconds(clock: Clock, timed: list[float]) -> None:
    compute(clock, 2.0, 1.0, 10)
    assert not choose(1.0, 2.0)
    verdicts.write()
    assert verdicts.known(CPU, fastest._key("a", 300, CPU)[1:]) == [2.0, 1.0]
    assert verdicts.known(CARD, fastest._key("a", 300, CARD)[1:]) == [1.0, 2.0]
    kept = json.loads(verdicts.path().read_text())
    (machine,) = (name for name in kept["machines"] if name != verdicts._machine(CPU))
    for broken in ([1.0], [1.0, "2"], [1.0, float("inf")], [1, True], None):
        kept["machines"][machine] = {"a": broken}
        verdicts.path().write_text(json.dumps(kept))
        verdicts._stored.cache_clear()
        assert verdicts.known(CARD, "a") is None


def test_two_programs_write_one_file(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("one", "two"):
        verdicts.keep(CPU, kind, True)
        verdicts.write()
        monkeypatch.setattr(verdicts, "_new", {})
    assert verdicts.known(CPU, "one") and verdicts.known(CPU, "two")
    assert len(json.loads(verdicts.path().read_text())["machines"]) == 1
    fastest.start_over(CPU)
    assert verdicts.known(CPU, "one") is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "sdquant-verdicts", "machines": {"a": [1]}}', "[" * 99999])
def test_a_file_that_is_none_counts_as_none(text: str) -> None:
    verdicts.path().write_text(text)
    assert verdicts.known(CPU, "a") is None
    verdicts.keep(CPU, "a", True)
    verdicts.write()
    assert verdicts.known(CPU, "a") is True


def test_a_folder_that_cannot_be_written_loses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SDQUANT_SETTINGS", str(tmp_path / "file" / "settings.json"))
    verdicts.keep(CPU, "a", True)
    verdicts.write()
    assert verdicts.known(CPU, "a") is None


def test_one_that_raises_on_a_cpu_is_not_taken(clock: Clock) -> None:
    def raises() -> str:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    for _ in range(3):
        assert fastest.by_the_faster("a", 300, clock.work("usual", 1.0), raises) == "usual"
    assert fastest.is_settled("a", 300, CPU)


def test_threads_find_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    monkeypatch.setattr(verdicts, "keep", lambda device, kind, verdict: kept.append(verdict))
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            with fastest.lookups():
                fastest.verdicts_so_far()
            fastest.start_over(CARD)

    def multiply(number: int) -> list[int]:
        return [fastest.by_the_faster(f"b{i}", 300, lambda: 1, lambda: 1) for i in range(200) for _ in range(12)]

    with ThreadPoolExecutor(5) as pool:
        watched = pool.submit(look)
        found = list(pool.map(multiply, range(4)))
        done.set()
        watched.result()
    assert found == [[1] * 2400] * 4
    for i in range(200):
        for _ in range(2 * fastest.CALLS):
            fastest.by_the_faster(f"b{i}", 300, lambda: 1, lambda: 1)
    assert len(kept) == 200


def test_a_card_is_timed_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    monkeypatch.setattr(fastest, "gpu_seconds", lambda run, device: timed.append(1) or sleep(0.01) or 1.0)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: choose(1.0, 1.0), range(4))) == [False] * 4
    assert len(timed) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_while_a_card_is_timed_does_not_wait(timed: list[float]) -> None:
    """The lock would be held in the new process by a thread that is not there."""
    begun, end = threading.Event(), threading.Event()

    def slow() -> float:
        begun.set()
        end.wait(60)
        return 1.0

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fastest.prefers_other, "slow", 300, CARD, slow, slow)
        assert begun.wait(60)
        child = os.fork()
        if not child:
            os._exit(0 if fastest.by_the_faster("b", 300, lambda: 5, lambda: 5) == 5 else 1)
        ended, status = 0, -1
        for _ in range(600):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            sleep(0.1)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        end.set()
        first.result(60)
    assert (ended, status) == (child, 0)


class _Event:
    """An event of a card whose clock is told what it shows, in seconds."""

    def __init__(self, card: Clock) -> None:
        self.card, self.at = card, 0.0

    def record(self) -> None:
        self.at = self.card.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


class _Waste:
    """Memory of a card that is larger than its cache."""

    def __init__(self, made: list[str]) -> None:
        self.made = made

    def zero_(self) -> None:
        self.made.append("written over")


@pytest.mark.parametrize(("on_card", "launching", "seconds"), [(2.0, 0.5, 2.0), (2.0, 3.0, 3.0)])
def test_a_card_is_timed_with_cold_caches(
    on_card: float, launching: float, seconds: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With warm ones an H200 took the product with packed codes, 71 us with 16 rows of 3072 to 12288, for faster than
    decoding, 55: the 38 MB of codes stay in its 63 MB of cache, and in a model they do not."""
    card = Clock()
    monkeypatch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: card.made.append("sleep"), raising=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: _Event(card))
    monkeypatch.setattr(fastest, "_waste", lambda device: _Waste(card.made))

    def run() -> None:
        card.work("run", on_card)()
        clock.work("launch", launching)()

    assert fastest.gpu_seconds(run, CARD) == seconds
    assert card.made == ["run"] * 3 + ["sleep"] + ["written over", "run"] * 5


def test_a_card_without_free_memory_is_timed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def empty(size: int, **of: object) -> torch.Tensor:
        asked.append(size)
        if size:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.zeros(0)

    properties = type("Properties", (), {"L2_cache_size": 50 << 20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "empty", empty)
    assert fastest._waste(CARD).numel() == 0 and asked == [100 << 20, 0]

"""Which of two implementations is taken, with a clock that is told what it shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sdquant.kernels import fastest

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "_found", {})
    monkeypatch.delenv("SDQUANT_TUNE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was timed; an implementation returns the seconds it takes."""
    seen: list[float] = []

    def seconds(run: Callable[[], float], device: torch.device) -> float:
        seen.append(run())
        return seen[-1]

    monkeypatch.setattr(fastest, "_seconds", seconds)
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


def test_one_that_does_not_work_is_not_taken(timed: list[float]) -> None:
    def raises() -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert not fastest.prefers_other("a", 300, CARD, lambda: 1.0, raises)

"""Traces of a step: made once in the background, kept beside the settings, and never in the way of an answer."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from sdquant.models import Product, Trace, Work
from sdquant.ui import trace_files
from sdquant.ui.step_traces import StepTraces

from ..patience import PATIENCE


def a_trace(weight: str = "proj.weight") -> dict[str, Trace | None]:
    one = Product(weight=weight, kind="linear", numbers=64, rows=4, dtype=torch.bfloat16)
    other = Product(weight=None, kind="linear", numbers=16, rows=2, dtype=torch.float32)
    work = Work(products=Counter({one: 3, other: 1}), others=5, made=700)
    return {"transformer": Trace(peak=10, work=work, kernels=2), "vae": None}


def found(traces: StepTraces, key: object) -> Any:
    until = time.monotonic() + PATIENCE
    while (answer := traces.find(key, None)) is None and time.monotonic() < until:  # type: ignore[arg-type]
        time.sleep(0.02)
    return answer


def test_made_once_and_there_at_the_next_start(tmp_path: Path) -> None:
    made: list[object] = []

    def make(plan: object) -> dict[str, Trace | None]:
        made.append(plan)
        return a_trace()

    traces = StepTraces(tmp_path, make)
    assert traces.find("a", None) is None  # type: ignore[arg-type]
    assert found(traces, "a") == a_trace() and traces.is_there("a") and not traces.is_there("b")
    until = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("*.json")) and time.monotonic() < until:
        time.sleep(0.02)
    assert StepTraces(tmp_path, make).find("a", None) == a_trace()  # type: ignore[arg-type]
    assert len(made) == 1


def test_it_waits_while_somebody_does(tmp_path: Path) -> None:
    made: list[object] = []
    traces = StepTraces(tmp_path, lambda plan: made.append(plan) or {})
    with traces.aside():
        assert traces.find("a", None) is None  # type: ignore[arg-type]
        time.sleep(0.5)
        assert not made
    assert found(traces, "a") == {} and made


def test_a_model_that_cannot_be_traced_is_asked_once(tmp_path: Path) -> None:
    def make(plan: object) -> dict[str, Trace | None]:
        raise RuntimeError("no such network")

    assert found(StepTraces(tmp_path, make), "a") == {}
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"unet": 5}', '{"unet": {"products": [["a", "other", 1, 1, "x", 1]]}}']
)
def test_a_damaged_file_is_forgotten(tmp_path: Path, text: str) -> None:
    trace_files.write_trace(tmp_path, "a", a_trace())
    (file,) = tmp_path.iterdir()
    assert trace_files.read_trace(tmp_path, "a") == a_trace()
    assert trace_files.read_trace(tmp_path, "b") is None
    file.write_text(text)
    assert trace_files.read_trace(tmp_path, "a") is None


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "_MOST", 3)
    for key in range(trace_files._MOST + 3):
        trace_files.write_trace(tmp_path, key, a_trace())
    assert len(list(tmp_path.iterdir())) == trace_files._MOST

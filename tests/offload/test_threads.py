"""Threads on one offloaded pipeline take turns; without offload they run at once. Images are the same either way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from sdquant import offload

from .test_balanced import REST, Net, Pipe, run

MOVING = [mode.name for mode in offload.MODES if mode.name != "none"]


def offloaded(mode: str, model: Any, folder: Path, budget: int) -> offload.OffloadHandle:
    room = {"budget": budget} if mode == "balanced" else {}
    return offload.apply(model, mode, device="cpu", folder=folder, **room)


def started(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("mode", MOVING)
def test_a_second_thread_waits_until_the_first_is_out(mode: str, tmp_path: Path) -> None:
    one, two = Net(seed=1), Net(seed=2)
    expected = run(one), run(two)
    inside, go_on = threading.Event(), threading.Event()

    def pause(*_: object) -> None:
        if not go_on.is_set():
            inside.set()
            assert go_on.wait(60)

    one.tail.register_forward_pre_hook(pause)
    handle = offloaded(mode, Pipe(one=one, two=two), tmp_path, 8 * REST)
    found: dict[str, torch.Tensor] = {}
    first = started(lambda: found.update(one=run(one)))
    assert inside.wait(60)
    second = started(lambda: found.update(two=run(two)))
    second.join(0.2)
    assert second.is_alive() and not found
    go_on.set()
    first.join(60)
    second.join(60)
    assert torch.equal(found["one"], expected[0]) and torch.equal(found["two"], expected[1])
    handle.remove()


@pytest.mark.parametrize("mode", MOVING)
@pytest.mark.parametrize("how", ["suspended", "remove"])
def test_who_waited_while_the_mode_changed_computes_with_what_is_there_then(
    mode: str, how: str, tmp_path: Path
) -> None:
    net = Net()
    expected = run(net)
    handle = offloaded(mode, Pipe(net=net), tmp_path, 4 * REST)
    forward = net.forward  # what torch looks up before the thread waits
    found: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            found.append(forward(torch.ones(1, 64)))

    with handle.lock:
        thread = started(call)
        thread.join(0.2)
        assert thread.is_alive()
        if how == "remove":
            handle.remove()
        else:
            with handle.suspended():
                assert torch.equal(run(net), expected)
    thread.join(60)
    assert torch.equal(found[0], expected) and torch.equal(run(net), expected)
    handle.remove()


@pytest.mark.parametrize("mode", MOVING)
def test_a_call_that_fails_lets_the_next_thread_in(mode: str, tmp_path: Path) -> None:
    net = Net()
    expected = run(net)
    handle = offloaded(mode, Pipe(net=net), tmp_path, 4 * REST)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.ones(1, 3))
    found: list[torch.Tensor] = []
    started(lambda: found.append(run(net))).join(60)
    assert torch.equal(found[0], expected)
    handle.remove()

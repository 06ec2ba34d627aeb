"""Threads on one offloaded pipeline take turns; without offload they run at once. Images are the same either way."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import PNDMScheduler, StableDiffusionPipeline

import sdquant
from sdquant import offload
from sdquant.offload import locking
from sdquant.offload.locking import ComputingLock

from .conftest import DEVICE
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


@pytest.mark.parametrize(
    ("scheme", "mode", "runtime"),
    [("int8", "none", None), *(("int8", mode, None) for mode in MOVING), ("nf4", "model", "library")],
)
def test_requests_of_a_server(scheme: str, mode: str, runtime: str | None) -> None:
    """A thread for each request. An offloaded pipeline is one request's from its beginning to its end, so that they may
    share its scheduler, too, which counts steps, and its tokenizer, which has its padding set at each call; without
    offload each needs its own, as with diffusers alone."""
    room = {"budget": "2MB"} if mode == "balanced" else {}
    pipe = sdquant.load_model(
        sdquant.demo.path("digits-sd"), scheme, mode, runtime=runtime, progress=False, device=DEVICE, **room
    )  # fmt: skip
    pipe.scheduler = PNDMScheduler.from_config(pipe.scheduler.config, skip_prk_steps=True)
    pipe.set_progress_bar_config(disable=True)

    def draw(seed: int) -> torch.Tensor:
        used = pipe
        if mode == "none":
            scheduler = PNDMScheduler.from_config(pipe.scheduler.config, skip_prk_steps=True)
            parts = pipe.components | {"scheduler": scheduler, "tokenizer": copy.deepcopy(pipe.tokenizer)}
            used = StableDiffusionPipeline(**parts, requires_safety_checker=False)
            used.set_progress_bar_config(disable=True)
        made = used(
            f"a handwritten {seed}", num_inference_steps=3, generator=torch.Generator().manual_seed(seed),
            output_type="pt",
        ).images  # fmt: skip
        assert isinstance(made, torch.Tensor)
        return made

    alone = [draw(seed) for seed in range(3)]
    found: dict[tuple[int, int], torch.Tensor] = {}
    threads = [
        started(lambda seed=seed, turn=turn: found.update({(seed, turn): draw(seed)}))
        for turn in range(2)
        for seed in range(3)
    ]
    for thread in threads:
        thread.join(120)
    assert len(found) == 6  # none ended with an error
    assert all(torch.equal(image, alone[seed]) for (seed, _), image in found.items())


def test_the_lock_lets_in_who_computes_gradients_for_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autograd's threads do on a card; see tests/card for real ones. Others wait, even then."""
    lock, ready, go_on = ComputingLock(), threading.Event(), threading.Event()
    inside: list[str] = []

    def _engine_run_backward() -> None:
        ready.set()
        assert go_on.wait(60)

    def hold() -> None:
        with lock, lock:
            _engine_run_backward()

    def enter(name: str) -> None:
        with lock, lock:
            inside.append(name)

    autograd: set[int] = set()
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 1 if threading.get_ident() in autograd else -1)
    holder = started(hold)
    assert ready.wait(60)
    other = started(lambda: enter("other"))

    def compute() -> None:
        autograd.add(threading.get_ident())
        enter("autograd")

    started(compute).join(60)
    other.join(0.1)
    assert inside == ["autograd"] and other.is_alive()
    monkeypatch.setattr(locking, "_WAITING", "another function")  # the holder does something else
    third = started(compute)
    third.join(0.1)
    assert third.is_alive()
    go_on.set()
    for thread in (holder, other, third):
        thread.join(60)
    assert sorted(inside) == ["autograd", "autograd", "other"]

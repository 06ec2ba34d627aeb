"""Ctrl-C, or an error of a callback, in the middle of drawing: the next picture is the same as ever, no lock is held,
and taking the mode off leaves nothing behind."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from .conftest import draw, hooked, made
from .test_threads import MOVING, offloaded, started

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sdquant import offload

BUDGET = 3_000_000


class Stop(Exception):
    """What a callback raises."""


def _draw(pipe: Any, callback: Any) -> Any:
    return pipe(
        "a handwritten seven", num_inference_steps=2, height=32, width=32, output_type="np",
        generator=torch.Generator().manual_seed(0), callback_on_step_end=callback,
    )  # fmt: skip


def _control_c(*_: Any) -> Any:
    """What Ctrl-C does: the signal, whose handler raises in the main thread."""
    signal.raise_signal(signal.SIGINT)
    return {}


def _fail(*_: Any) -> Any:
    raise Stop


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's own handler; pytest-xdist's workers ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("where", ["callback", "inside a layer"])
@pytest.mark.parametrize("mode", MOVING)
def test_control_c_in_the_main_thread(mode: str, where: str, tmp_path: Path) -> None:
    pipe = made("sd")
    wanted = draw(pipe)
    handle = offloaded(mode, pipe, tmp_path, BUDGET)
    layer = pipe.unet.mid_block.attentions[0]
    remove = layer.register_forward_pre_hook(_control_c if where == "inside a layer" else lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        _draw(pipe, _control_c if where == "callback" else None)
    remove.remove()
    _as_before(pipe, handle, wanted, tmp_path)


@pytest.mark.parametrize("mode", MOVING)
def test_an_error_of_a_callback_in_another_thread(mode: str, tmp_path: Path) -> None:
    pipe = made("sd")
    wanted = draw(pipe)
    handle = offloaded(mode, pipe, tmp_path, BUDGET)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            _draw(pipe, _fail)
        except Stop as error:
            raised.append(error)

    thread = started(work)
    thread.join(120)
    assert len(raised) == 1 and not thread.is_alive()
    _as_before(pipe, handle, wanted, tmp_path)


def _as_before(pipe: Any, handle: offload.OffloadHandle, wanted: Any, folder: Path) -> None:
    found: list[Any] = []
    for _ in range(2):  # in another thread, which a lock that is still held would keep waiting
        thread = started(lambda: found.append(draw(pipe)))
        thread.join(120)
        assert not thread.is_alive(), "a lock is held"
    assert (draw(pipe) == wanted).all()
    assert len(found) == 2 and all((one == wanted).all() for one in found)
    handle.remove()
    assert (draw(pipe) == wanted).all() and not hooked(pipe)
    assert not list(folder.iterdir())

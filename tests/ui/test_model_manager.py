"""The one model in memory: switching, keeping the old one where the new one fails, cancelling, pages at once."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
import weakref
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageChops

import sdquant
from sdquant import demo
from sdquant.compat import hardware
from sdquant.models.generate import Stopped
from sdquant.planning.request import Request, make_request
from sdquant.ui import model_manager as engines
from sdquant.ui.model_manager import Drawing, Engine, Job, Progress

SEVEN = Drawing(prompt="a handwritten seven", steps=3, seed=1)


def asked(name: str = "digits-sd", **values: object) -> Request:
    return make_request(demo.path(name), progress=False, **values)


def same(one: Image.Image, other: Image.Image) -> bool:
    return ImageChops.difference(one, other).getbbox() is None


def test_draw_loads_once_and_tells_where_it_is() -> None:
    engine, told = Engine(), list[Progress]()
    first = engine.draw(asked(quant="nf4", offload="balanced", budget="4MB"), SEVEN, Job(told.append))
    assert first.switched and first.held is engine.held
    assert 0 < first.peak <= 4_000_000
    stages = [at.stage for at in told]
    assert stages == sorted(stages, key=["loading", "drawing"].index)
    assert [at.done for at in told if at.stage == "drawing"] == [0, 1, 2, 3]
    again = engine.draw(asked(quant="nf4", offload="balanced", budget="4MB"), SEVEN)
    assert not again.switched and same(first.image, again.image)


def test_a_switch_frees_the_old_model() -> None:
    engine = Engine()
    old = weakref.ref(engine.load(asked(quant="nf4")).pipe.unet)
    new = weakref.ref(engine.load(asked()).pipe.unet)
    assert old() is None and new() is not None
    engine.unload()
    assert engine.held is None and new() is None


REFUSED = ({"quant": "qint8", "offload": "balanced"}, sdquant.IncompatibleError)  # before a weight is read
FAILED = ({"quant": "nf4", "offload": "balanced", "budget": "1kB"}, sdquant.BudgetError)  # known after the load


@pytest.mark.parametrize(
    ("values", "error", "beside"),
    [
        (*REFUSED, True),
        (*FAILED, False),
        pytest.param(*REFUSED, False, marks=pytest.mark.slow),
        pytest.param(*FAILED, True, marks=pytest.mark.slow),
    ],
)
def test_a_failed_load_leaves_the_old_model(
    values: dict[str, object], error: type[Exception], beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_both_fit", lambda made: beside)  # the fault: too little memory for two
    engine = Engine()
    before = engine.draw(asked(quant="int8"), SEVEN)
    with pytest.raises(error):
        engine.load(asked(**values))
    assert engine.held is not None and engine.held.asked == before.held.asked
    assert same(engine.draw(asked(quant="int8"), SEVEN).image, before.image)


@pytest.mark.parametrize("beside", [True, False])
def test_a_damaged_file_leaves_the_old_model(beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_both_fit", lambda made: beside)
    shutil.copytree(demo.path("digits-sd"), tmp_path / "broken")
    weights = next((tmp_path / "broken" / "unet").glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    engine = Engine()
    engine.load(asked())
    with pytest.raises(sdquant.BadFileError):
        engine.load(make_request(tmp_path / "broken"))
    assert engine.held is not None and engine.held.asked == asked()


def test_a_file_that_was_written_anew_is_loaded_anew(tmp_path: Path) -> None:
    shutil.copytree(demo.path("digits-sd"), tmp_path / "model")
    engine, wanted = Engine(), make_request(tmp_path / "model", progress=False)
    first = engine.load(wanted)
    assert engine.load(wanted) is first
    weights = next((tmp_path / "model" / "unet").glob("*.safetensors"))
    os.utime(weights, ns=(0, 1))
    second = engine.load(wanted)
    assert second is not first
    weights.unlink()  # what is in memory can still draw
    assert engine.draw(wanted, SEVEN).held is second


@pytest.mark.parametrize("at", ["loading", "drawing"])
def test_cancel(at: str) -> None:
    engine = Engine()
    job = Job(lambda progress: job.cancel() if progress.stage == at and progress.done > 0 else None)
    with pytest.raises(Stopped):
        engine.draw(asked(quant="nf4"), SEVEN, job)
    assert (engine.held is None) == (at == "loading")
    fresh = Engine().draw(asked(quant="nf4"), SEVEN).image
    assert same(engine.draw(asked(quant="nf4"), SEVEN).image, fresh)


def test_two_pages_take_turns_and_get_their_own_images() -> None:
    engine = Engine()
    wanted = {
        "one": (asked(quant="nf4"), SEVEN),
        "two": (asked("digits-flux"), Drawing(prompt="a handwritten two", steps=3, seed=5)),
    }
    alone = {name: Engine().draw(*pair).image for name, pair in wanted.items()}
    got: dict[str, list[Image.Image]] = {name: [] for name in wanted}
    waited = threading.Event()

    def page(name: str) -> None:
        for _ in range(2):
            tell = lambda progress: waited.set() if progress.stage == "waiting" else None  # noqa: E731
            got[name].append(engine.draw(*wanted[name], Job(tell)).image)

    threads = [threading.Thread(target=page, args=(name,)) for name in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert waited.is_set()
    for name, images in got.items():
        assert [same(image, alone[name]) for image in images] == [True, True]


def test_a_comparison_leaves_the_model_or_brings_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    with engine.alone(Job()):
        assert engine.held is None
    loaded = engine.load(asked(quant="nf4"))
    with engine.alone(Job()):
        assert engine.held is loaded
    here = hardware.probe()
    room = dataclasses.replace(here, ram_available=2 * loaded.plan.bytes + 1)  # of one like it, but for its original
    monkeypatch.setattr(hardware, "probe", lambda: room)
    with pytest.raises(Stopped), engine.alone(Job()):
        assert engine.held is None
        raise Stopped
    assert engine.held is not None and engine.held.asked == loaded.asked


def test_a_waiting_page_can_be_cancelled() -> None:
    engine, inside, go = Engine(), threading.Event(), threading.Event()

    def hold() -> None:
        with engine.alone(Job()):
            inside.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    job = Job(lambda progress: job.cancel())
    try:
        with pytest.raises(Stopped):
            engine.load(asked(), job)
    finally:
        go.set()
        thread.join()
    assert engine.load(asked()).bytes > 0


@pytest.mark.parametrize(
    ("fault", "why"),
    [(torch.OutOfMemoryError("CUDA out of memory"), "not enough memory"), (ValueError("boom"), "boom")],
)
def test_errors_of_libraries_become_sentences(fault: Exception, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr("sdquant.loading.loader.load_planned", broken)
    with pytest.raises(sdquant.SdquantError, match=why):
        Engine().load(asked())

"""Drawing step by step: what is told on the way, and that a stop leaves the pipeline as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sdquant
from sdquant import offload
from sdquant.demo import path
from sdquant.models.generate import Stopped, draw
from sdquant.training import digits

MODES = [row.name for row in offload.MODES]


def images(pipe: Any, **values: Any) -> Any:
    """Two digits in two steps, one after the other."""
    made = draw(pipe, [digits.prompt(3), digits.prompt(7)], seeds=(1, 2), steps=2, batch=1, **values)
    return np.stack([np.asarray(image) for image in made])


@pytest.fixture(scope="module", params=["digits-sd", pytest.param("digits-flux", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> tuple[Path, Any]:
    """A shipped model's folder, and what a fresh pipeline of it draws."""
    place = path(request.param)
    return place, images(sdquant.load_model(place, progress=False))


def test_steps_are_told(model: tuple[Path, Any]) -> None:
    told: list[tuple[int, int]] = []
    made = images(sdquant.load_model(model[0], progress=False), on_step=lambda *at: told.append(at))
    assert told == [(done, 4) for done in range(5)]
    assert (made == model[1]).all()


def test_a_scheduler_that_takes_more_steps(sd: Path) -> None:
    from diffusers import PNDMScheduler

    pipe = sdquant.load_model(sd, progress=False)
    pipe.scheduler = PNDMScheduler.from_config(pipe.scheduler.config, skip_prk_steps=True)
    told: list[tuple[int, int]] = []
    images(pipe, on_step=lambda *at: told.append(at))
    assert told == [(0, 4), *((done, 6) for done in range(1, 7))]


def test_a_pipeline_that_tells_no_steps(sd: Path) -> None:
    pipe = sdquant.load_model(sd, progress=False)

    class Silent(type(pipe)):  # type: ignore[misc]
        def __call__(self, prompt: Any, generator: Any, num_inference_steps: int) -> Any:
            return super().__call__(prompt, num_inference_steps=num_inference_steps, generator=generator)

    pipe.__class__ = Silent
    told: list[tuple[int, int]] = []
    images(pipe, on_step=lambda *at: told.append(at))
    assert told == [(0, 4), (2, 4), (4, 4)]


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_leaves_the_pipeline_working(mode: str, model: tuple[Path, Any]) -> None:
    place, expected = model
    budget = int(0.6 * sdquant.plan(place).bytes) if mode == "balanced" else None
    pipe = sdquant.load_model(place, None, mode, budget=budget, progress=False)
    for last in (1, 3):  # in the midst of the first picture, and of the second: then the first is done
        stop, told = Stopped(), []

        def on_step(done: int, total: int, *, last: int = last, stop: Stopped = stop, told: list[int] = told) -> None:
            told.append(done)
            if done == last:
                raise stop

        with pytest.raises(Stopped) as caught:
            images(pipe, on_step=on_step)
        assert caught.value is stop and told == list(range(last + 1))
    assert (images(pipe) == expected).all()
    pipe.sdquant.offload.remove()


@pytest.mark.parametrize("error", [ValueError("not divisible by 8"), KeyboardInterrupt(), RuntimeError("full")])
@pytest.mark.parametrize("last", [0, 1])
def test_what_is_raised_comes_out_unchanged(last: int, error: BaseException, loaded: Any) -> None:
    def on_step(done: int, total: int) -> None:
        if done == last:
            raise error

    with pytest.raises(type(error)) as caught:
        images(loaded("int8"), on_step=on_step)
    assert caught.value is error

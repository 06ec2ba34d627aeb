"""quant="auto", offload="auto": the choice on made-up machines, and the load that follows it on this one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import sdquant
from sdquant import cli
from sdquant.compat import hardware
from sdquant.errors import BudgetError, SettingsError
from sdquant.models.generate import draw
from sdquant.offload.budget import LEAST_MARGIN
from sdquant.planning import auto
from sdquant.planning.request import make_request

from . import sparse_pipelines

MODEL = "digits-flux"


@pytest.fixture(scope="module")
def here() -> hardware.Machine:
    """This machine as if nobody had measured what computes how fast on it."""
    return dataclasses.replace(hardware.probe(), native="not asked for")


def quant_of(made: Any) -> dict[str, str] | None:
    """The scheme that each component gets, as `quant=` takes it."""
    return {name: str(spec) for name, spec in made.specs.items()} or None


def with_free(here: hardware.Machine, nbytes: int) -> hardware.Machine:
    """The machine with so many bytes for weights and activations; what its margin takes comes on top."""
    device = dataclasses.replace(here.best, memory_free=nbytes + LEAST_MARGIN, memory_total=nbytes + LEAST_MARGIN)
    return dataclasses.replace(here, devices=(device,))


def chosen(here: hardware.Machine, nbytes: int, **asked: Any) -> Any:
    made = auto.resolve(make_request(sdquant.demo.path(MODEL), **asked), with_free(here, nbytes))
    assert not made.why.endswith(".")
    return made


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    from sdquant.planning.estimate import peak_memory

    made = sdquant.plan(sdquant.demo.path(MODEL))
    activations = peak_memory.predict(made, hardware.probe()).activations
    assert activations is not None
    return {"weights": made.bytes, "activations": activations, "largest": max(part.bytes for part in made.components)}


def test_what_fits_whole_is_left_as_it_is(here: hardware.Machine, sizes: dict[str, int]) -> None:
    made = chosen(here, sizes["weights"] + sizes["activations"] + 1000, quant="auto", offload="auto")
    assert (quant_of(made), made.offload_mode.name, made.budget) == (None, "none", None)
    assert "everything stays on the device" in made.why


def test_what_does_not_is_quantized_as_little_as_keeps_it_whole(here: hardware.Machine, sizes: dict[str, int]) -> None:
    eight = sdquant.plan(sdquant.demo.path(MODEL), "int8").bytes
    room = int(1.2 * eight) + sizes["activations"]
    made = chosen(here, room, quant="auto", offload="auto")
    assert made.offload_mode.name == "none" and quant_of(made)
    assert {sdquant.backends.scheme(name).bits for name in quant_of(made).values()} <= {6, 7, 8}
    plan = sdquant.plan(sdquant.demo.path(MODEL), quant_of(made))
    assert plan.bytes + sizes["activations"] <= room
    less = chosen(here, int(0.5 * eight) + sizes["activations"], quant="auto", offload="auto")
    assert sdquant.plan(sdquant.demo.path(MODEL), quant_of(less)).bytes < plan.bytes


def test_without_quantization_components_take_turns_before_blocks_do(
    here: hardware.Machine, sizes: dict[str, int]
) -> None:
    turns = chosen(here, sizes["largest"] + sizes["activations"] + 100_000, offload="auto")
    assert turns.offload_mode.name == "balanced" and quant_of(turns) is None
    assert "take turns" in turns.why


@pytest.mark.slow
def test_what_streams_least_is_taken_where_nothing_fits_whole(
    here: hardware.Machine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A transformer of FLUX.1's shapes on several cards; alone, so that activations are the rough allowance."""
    path = sparse_pipelines.flux(tmp_path_factory.mktemp("big") / "flux") / "transformer"
    found = {}
    for gigabytes in (40, 16, 10, 4):
        memory = gigabytes * 10**9
        card = hardware.Device(kind="cuda", index=0, name="a card", memory_total=memory, memory_free=memory)
        other = dataclasses.replace(here, devices=(card, here.devices[-1]))
        made = auto.resolve(make_request(path, offload="auto", device="cuda"), other)
        found[gigabytes] = made.offload_mode.name, made.budget
    assert found[40] == ("none", None)
    for gigabytes in (16, 10, 4):
        mode, budget = found[gigabytes]
        assert mode == "balanced" and budget is not None and 0.5 * gigabytes < budget / 10**9 < gigabytes - 1.5


def test_a_mode_that_the_matrix_refuses_is_not_chosen(here: hardware.Machine, sizes: dict[str, int]) -> None:
    """quanto's modules break in balanced offload."""
    whole = sdquant.plan(sdquant.demo.path(MODEL), "qint8").bytes
    made = chosen(here, int(0.9 * whole) + sizes["activations"], quant="qint8", offload="auto", runtime="library")
    assert (quant_of(made), made.offload_mode.name) == ({"*": "qint8"}, "model")


def test_a_mode_that_was_named_is_kept(here: hardware.Machine, sizes: dict[str, int]) -> None:
    made = chosen(here, 2 * sizes["weights"] + sizes["activations"], quant="auto", offload="model")
    assert (quant_of(made), made.offload_mode.name) == (None, "model")


def test_nothing_fits(here: hardware.Machine) -> None:
    with pytest.raises(BudgetError, match="no way to run this model"):
        chosen(here, 1000 - LEAST_MARGIN, quant="auto", offload="auto")


def test_the_matrix_is_asked_for_a_mode_that_works() -> None:
    sdquant.check("qint8", "auto", device="cpu")
    with pytest.raises(sdquant.IncompatibleError):
        sdquant.check("q8_0", "auto", mode="pre", device="cpu")  # in no mode


def test_where_nothing_can_be_chosen() -> None:
    with pytest.raises(SettingsError, match="before a model is loaded"):
        sdquant.quantize(torch.nn.Linear(64, 64), "auto")
    words = ["digits-sd", "a picture", "--offload", "auto"]
    assert cli.main(["compare", *words]) == 2


@pytest.mark.parametrize("other", [{"components": ["unet"]}, {"mode": "post"}, {"rules": [{"weight_qtype": "int8"}]}])
def test_what_contradicts_it(other: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="auto chooses"):
        make_request("x", quant="auto", **other)


def test_load_and_plan_tell_what_was_chosen() -> None:
    made = sdquant.plan(sdquant.demo.path("digits-sd"), "AUTO", "auto")
    assert made.offload == "none" and made.why is not None and made.to_dict()["why"] == made.why
    pipe = sdquant.load_model(sdquant.demo.path("digits-sd"), "auto", "auto", progress=False)
    assert pipe.sdquant.plan.why is not None and pipe.sdquant.offload.mode == "none"
    assert draw(pipe, ["a picture"], seeds=[0], steps=1)[0].size == (32, 32)


def test_a_budget_limits_it() -> None:
    path = sdquant.demo.path("digits-sd")
    pipe = sdquant.load_model(path, offload="auto", budget="2MB", progress=False)
    assert pipe.sdquant.offload.mode == "balanced"
    draw(pipe, ["a picture"], seeds=[0], steps=1)
    assert pipe.sdquant.offload.report()["peak"] <= 2_000_000
    pipe.sdquant.offload.remove()


def test_a_mode_that_keeps_more_in_memory_than_the_budget_is_not_chosen() -> None:
    """By group, quanto's tensors stay in memory on the CPU, as they cannot be read from a file."""
    from sdquant.planning.estimate import peak_memory

    held = peak_memory.predict(
        sdquant.plan(sdquant.demo.path(MODEL), "qint4", runtime="library", offload="group"), hardware.probe()
    ).weights
    made = sdquant.plan(sdquant.demo.path(MODEL), "auto", offload="auto", budget=held // 2)
    assert peak_memory.predict(made, hardware.probe()).weights <= held // 2

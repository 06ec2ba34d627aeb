"""The peak of memory that a plan foretells, against what is then on the device: within 5 %."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import sdquant
from sdquant import cli, offload
from sdquant.compat import hardware
from sdquant.errors import BudgetError, IncompatibleError, SettingsError
from sdquant.kernels import onednn, workspace
from sdquant.models import activation_memory, pipelines
from sdquant.models.generate import draw
from sdquant.offload.budget import LEAST_MARGIN, LEAST_RESERVE, default_budget, room
from sdquant.planning.estimate import peak_memory
from sdquant.planning.preparation import prepare
from sdquant.planning.request import make_request

from .compat.machines import GIB, card, machine

if TYPE_CHECKING:
    from sdquant.planning.plan import Peak

WITHIN = 0.05
CARD = card("cuda", free=3 * GIB)
# A model, a scheme, and the runtime: one of each backend that quantizes, and both runtimes where there are two.
QUICK = [("digits-flux", "int8", None)]
REST = [("digits-sd", None, None), ("digits-flux", None, None), ("digits-sd", "int8", None)]
REST += [
    (m, s, r) for m in sdquant.demo.MODELS for s, r in (("nf4", "library"), ("nf4", "plain"), ("sdnq-uint4", None))
]
REST += [(model, "qint8", "library") for model in sdquant.demo.MODELS]
EVERY = [pytest.param(*row, marks=pytest.mark.slow) for row in QUICK + REST]
CASES = [pytest.param(*row) for row in QUICK] + [pytest.param(*row, marks=pytest.mark.slow) for row in REST]


def foretell(plan: sdquant.Plan, here: hardware.Machine | None = None, **size: int) -> Peak:
    """For a machine, or this one."""
    return peak_memory.predict(plan, here or hardware.probe(), **size)


def modes(made: sdquant.Plan) -> list[tuple[str, int | None]]:
    """Every mode, balanced with room for nearly all and with less than the largest component, which is streamed."""
    sizes = [part.bytes for part in made.components]
    tight = [("balanced", int(0.9 * sum(sizes))), ("balanced", int(0.9 * max(sizes)))]
    return [(row.name, None) for row in offload.MODES] + tight


@pytest.mark.parametrize(("model", "scheme", "runtime"), EVERY)
def test_weights_on_the_device_at_once(model: str, scheme: str | None, runtime: str | None) -> None:
    hold_weights_against_the_plan(model, scheme, runtime)


def test_weights_on_the_device_at_once_in_two_modes() -> None:
    hold_weights_against_the_plan("digits-flux", "int8", None, slice(1, 2), slice(-1, None))


def hold_weights_against_the_plan(model: str, scheme: str | None, runtime: str | None, *which: slice) -> None:
    """In every mode, or those that the slices are of."""
    path = sdquant.demo.path(model)
    pipe = sdquant.load_model(path, scheme, runtime=runtime, progress=False)
    pipe.sdquant.offload.remove()
    rows = modes(pipe.sdquant.plan)
    for mode, budget in [row for part in which for row in rows[part]] or rows:
        try:
            made = sdquant.plan(path, scheme, mode, budget=budget, runtime=runtime)
        except IncompatibleError:
            continue  # of the matrix, which has its own tests
        foretold = foretell(made)
        handle = offload.apply(pipe, mode, device="cpu", budget=budget)
        for _ in range(2 if mode == "balanced" else 1):
            draw(pipe, ["a picture"], seeds=[0], steps=1)
        assert foretold.weights == pytest.approx(handle.report()["peak"], rel=WITHIN), (mode, budget)
        assert budget is None or foretold.weights <= budget
        handle.remove()


@pytest.mark.parametrize(("model", "scheme", "runtime"), CASES)
def test_of_all_that_computing_takes(model: str, scheme: str | None, runtime: str | None) -> None:
    """Weights, activations and the buffers that weights are decoded into, which stay when a first image is drawn."""
    path = sdquant.demo.path(model)
    foretold = foretell(sdquant.plan(path, scheme, runtime=runtime))
    pipe = sdquant.load_model(path, scheme, runtime=runtime, progress=False)
    workspace.release()
    draw(pipe, ["a picture"], seeds=[0], steps=1)
    kept = workspace.reserved_bytes()
    with activation_memory.measured(pipe) as seen:
        draw(pipe, ["a picture"], seeds=[0], steps=1)
    weights = offload.weight_bytes(*pipelines.components_of(pipe).values())
    unused = foretold.unused if kept else foretold.unused + foretold.scratch  # AMX multiplies so few rows undecoded
    assert foretold.bytes - foretold.kernels - unused == pytest.approx(weights + max(seen.values()) + kept, rel=WITHIN)


def test_a_budget_that_is_too_small_is_refused_before_anything_is_loaded() -> None:
    made = sdquant.plan(sdquant.demo.path("digits-sd"), offload="balanced", budget=10_000)
    with pytest.raises(BudgetError, match="largest block") as told:
        foretell(made)
    with pytest.raises(BudgetError) as later:
        sdquant.load_model(sdquant.demo.path("digits-sd"), offload="balanced", budget=10_000, progress=False)
    numbers = [int(error.value.fix.split("at least ")[1].split()[0]) for error in (told, later)]
    assert numbers[0] == pytest.approx(numbers[1], rel=WITHIN)


def test_the_default_budget_is_what_is_free_less_activations_and_a_margin() -> None:
    gigabyte = 10**9
    assert room(20 * gigabyte, 24 * gigabyte, 3 * gigabyte) == 17 * gigabyte - 24 * gigabyte // 50
    assert room(20 * gigabyte, 4 * gigabyte, 0) == 20 * gigabyte - LEAST_MARGIN
    assert room(20 * gigabyte, 24 * gigabyte, None) == 20 * gigabyte - 24 * gigabyte * 15 // 100  # a guess
    assert room(2 * gigabyte, 4 * gigabyte, None) == 2 * gigabyte - LEAST_RESERVE
    assert room(gigabyte, 24 * gigabyte, 2 * gigabyte) == 0


def test_a_device_that_does_not_say_what_is_free_needs_a_budget() -> None:
    with pytest.raises(SettingsError, match=r"privateuseone.* torch does not report .*budget='6GB'"):
        default_budget(torch.device("privateuseone"), 0)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", None])
def test_a_plan_for_another_machine_goes_by_what_is_free_there(
    device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = machine(CARD)
    monkeypatch.setattr(hardware, "probe", lambda: pytest.fail("this machine was asked"))
    plan = prepare(
        make_request(sdquant.demo.path("digits-flux"), quant="int8", offload="balanced", device=device), there
    )
    peak = foretell(plan, there)
    assert plan.device == (device or "cuda:0") and peak.activations is not None
    assert peak.budget == room(3 * GIB, 12 * GIB, peak.activations + peak.scratch)
    assert plan.bytes <= peak.weights < peak.budget  # all of it stays on the card
    full = machine(card("cuda", free=0.9 * plan.bytes + peak.activations + peak.scratch + LEAST_MARGIN))
    less = foretell(plan, full)
    assert less.budget is not None and less.weights <= less.budget < plan.bytes


def test_another_machine_that_does_not_say_what_is_free_needs_a_budget() -> None:
    there = machine(dataclasses.replace(CARD, memory_free=None))
    values: dict[str, Any] = {"quant": "int8", "offload": "balanced", "device": "cuda"}
    plan = prepare(make_request(sdquant.demo.path("digits-flux"), **values), there)
    with pytest.raises(SettingsError, match=r"cuda:0.* not report .*budget='6GB'"):
        foretell(plan, there)
    plan = prepare(make_request(sdquant.demo.path("digits-flux"), budget="1GB", **values), there)
    assert foretell(plan, there).budget == 10**9


def test_balanced_offload_keeps_room_for_activations() -> None:
    pipe = sdquant.load_model(sdquant.demo.path("digits-flux"), "int8", "balanced", progress=False)
    report = pipe.sdquant.offload.report()
    made = foretell(sdquant.plan(sdquant.demo.path("digits-flux"), "int8", "balanced"))
    assert made.activations is not None
    assert report["activations"] == made.activations + made.scratch
    assert report["budget"] == pytest.approx(made.budget, rel=0.2)  # the machine's free memory comes and goes
    assert report["fetches"] == 0


def test_of_a_component_alone(sd: Path) -> None:
    """A UNet's inputs are made as its pipeline makes them; what others take nobody has written down."""
    whole, alone = foretell(sdquant.plan(sd)), foretell(sdquant.plan(sd / "unet"))
    assert alone.activations == whole.parts["unet"]
    assert alone.bytes == alone.weights + whole.parts["unet"] + alone.kernels + alone.unused  # type: ignore[operator]
    if onednn.multiplies(torch.bfloat16) is False:
        assert alone.kernels == whole.kernels == 0
    else:
        assert 0 < alone.kernels < whole.kernels
    larger = foretell(sdquant.plan(sd / "unet"), width=128)  # 64 for its latents and a VAE like Stable Diffusion's
    assert larger.activations == pytest.approx(2 * alone.activations, rel=0.1)  # type: ignore[operator]
    with pytest.raises(SettingsError, match="multiples of 8 pixels"):
        foretell(sdquant.plan(sd / "unet"), height=33)
    vae = foretell(sdquant.plan(sd / "vae"))
    assert vae.activations is None and vae.bytes == vae.weights + vae.unused > vae.unused


def test_of_other_sizes(sd: Path) -> None:
    small, large = (foretell(sdquant.plan(sd), width=side, height=side) for side in (32, 64))
    assert large.weights == small.weights
    assert large.activations == pytest.approx(4 * small.activations, rel=0.1)  # type: ignore[operator]


def test_the_command_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "digits-sd", "-q", "int8", "--offload", "model", "--width", "64"]
    assert cli.main([*words, "--json"]) == 0
    peak = json.loads(capsys.readouterr().out)["peak"]
    said = foretell(sdquant.plan(sdquant.demo.path("digits-sd"), "int8", "model"), width=64)
    assert peak == said.to_dict() and peak["bytes"] > peak["weights"]
    assert cli.main(words) == 0
    assert "at the most" in capsys.readouterr().out

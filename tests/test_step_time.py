"""How long a step is foreseen to take: the table, the rows that layers see, and the choice that follows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sdquant
from bench import foreseen
from sdquant.compat import hardware
from sdquant.models import activation_memory
from sdquant.offload.budget import LEAST_MARGIN
from sdquant.planning import auto, ranking
from sdquant.planning.estimate import meta_models, step_time
from sdquant.planning.estimate.layer_timings import FILE, known
from sdquant.planning.estimate.scheme_snr import USABLE
from sdquant.planning.request import make_request
from tools import facts

from .test_auto import quant_of

if TYPE_CHECKING:
    from sdquant.models.activation_memory import Trace
    from sdquant.planning import plan as planner_plan

# The foreseen ratio over the measured one, at the most; all schemes taken for floats are off by up to 30 %.
WITHIN = 0.15


class Net(nn.Module):
    """x [2, 8, 6, 6] -> convolutions -> attention over places with 4 heads -> a linear layer, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.point = nn.Conv2d(16, 32, 1)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.point(self.conv(x)).flatten(2).transpose(1, 2)  # [2, 9, 32]
        heads = x.reshape(2, 9, 4, 8).transpose(1, 2)
        x = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(2, 9, 32)
        first: torch.Tensor = self.out(x)
        return self.out(first[:, :1])  # type: ignore[no-any-return]


def test_rows_that_layers_see() -> None:
    work = activation_memory.trace_of(Net(), torch.zeros(2, 8, 6, 6)).work
    seen = {(p.weight, p.kind, p.numbers, p.rows): times for p, times in work.products.items() if p.weight}
    assert seen == {
        ("conv.weight", "conv", 8 * 16 * 9, 2 * 9): 1,
        ("point.weight", "linear", 16 * 32, 2 * 9): 1,
        ("out.weight", "linear", 32 * 32, 2 * 9): 1,
        ("out.weight", "linear", 32 * 32, 2): 1,
    }
    attention = [p.numbers * p.rows * times for p, times in work.products.items() if p.weight is None]
    assert sum(attention) == 2 * 2 * 4 * (9 * 9 * 8)  # queries with keys, and that with values
    assert {p.dtype for p in work.products} == {torch.float32}


def test_the_table_is_what_was_measured() -> None:
    assert FILE.read_text(encoding="utf-8") == facts.text(), "run python -m tools.facts"
    assert {isa for isa, _, _ in known()} == {"amx", "avx512bf16", "avx2"}


def test_between_what_was_measured_and_beyond() -> None:
    row = known()["amx", "linear", "bfloat16"]
    exact = row.exact["nf4"]
    found = [row.ratios(("nf4",), count, None) for count in (*row.rows, 3, 10**6)]
    computing = [one[1] for one in found if one is not None]
    assert computing[: len(row.rows)] == pytest.approx(exact) and computing[-1] == exact[-1]
    assert min(exact[0], exact[1]) < computing[len(row.rows)] < max(exact[0], exact[1])  # type: ignore[type-var]
    assert row.ratios(("nf4,double_quant", "nf4"), 1, None) != row.ratios(("nf4",), 1, None)
    assert row.ratios(("nf4,block_size=128", "nf4"), 1, None) == row.ratios(("nf4",), 1, None)
    assert row.ratios(("unheard of",), 1, None) is None
    assert row.ratios(("nf4",), 4608, "int8")[1] < row.ratios(("nf4",), 4608, None)[1]  # type: ignore[index]
    call, twice = row.seconds(1000, 2 * row.rows[-1])
    assert twice == pytest.approx(2 * row.seconds(1000, row.rows[-1])[1]) and call > 0


@pytest.fixture(scope="module")
def traced() -> dict[str, dict[str, Trace | None]]:
    return {name: meta_models.trace_plan(sdquant.plan(sdquant.demo.path(name))) for name in sdquant.demo.MODELS}


@pytest.mark.parametrize("model", sdquant.demo.MODELS)
def test_against_what_was_measured(model: str) -> None:
    some = list(foreseen.cases((model,)))
    assert len(some) >= 9
    for case in some:
        assert case.ratio() == pytest.approx(case.measured, rel=WITHIN), case.scheme


def plan(quant: Any = "int8", runtime: str | None = "plain", **values: Any) -> planner_plan.Plan:
    return sdquant.plan(sdquant.demo.path("digits-sd"), quant, runtime=runtime, device="cpu", **values)


def test_a_unet_alone_takes_as_long_as_in_its_pipeline(traced: dict[str, dict[str, Trace | None]]) -> None:
    alone = sdquant.plan(sdquant.demo.path("digits-sd") / "unet", "int8", runtime="plain", device="cpu")
    found = step_time.step(alone, meta_models.trace_plan(alone), "amx")
    assert found == pytest.approx(step_time.step(plan(), traced["digits-sd"], "amx"), rel=1e-3)


def test_where_nothing_was_measured(traced: dict[str, dict[str, Trace | None]]) -> None:
    sd = traced["digits-sd"]
    ours = step_time.step(plan(), sd, "amx")
    assert ours is not None and ours < 1
    assert step_time.step(plan({"text_encoder": "int8"}), sd, "amx") == 1.0
    assert step_time.step(plan(None), sd, "amx") == 1.0
    for isa in ("portable", "not built", "turned off by SDQUANT_NATIVE=0; everything works, but slower"):
        assert step_time.step(plan(), sd, isa) is None
    assert step_time.step(plan("nf4", "library"), sd, "amx") is None
    floats8 = tuple(dataclasses.replace(part, compute="fp8") for part in plan().components)
    assert step_time.step(dataclasses.replace(plan(), components=floats8), sd, "amx") is None
    assert step_time.step(plan(), dict.fromkeys(sd), "amx") is None
    assert step_time.step(dataclasses.replace(plan(), device="cuda:0"), sd, "amx") is None


def test_schemes_that_nobody_measured(traced: dict[str, dict[str, Trace | None]]) -> None:
    """Nothing is said of them. Rules with other options are other schemes; options that change little are not."""
    sd = traced["digits-sd"]
    measured = step_time.step(plan("rules,act_qtype=int8"), sd, "avx512bf16")
    assert measured is not None and measured < 1
    assert step_time.step(plan("rules,act_qtype=int8,tile_size=32"), sd, "avx512bf16") is None
    assert step_time.step(plan("rules"), sd, "amx") is None  # there no rules were measured
    int4 = step_time.step(plan("int4"), sd, "amx")
    assert step_time.step(plan("int4,group_size=32"), sd, "amx") == int4 is not None


def test_in_integers(traced: dict[str, dict[str, Trace | None]]) -> None:
    exact, integers = (step_time.step(plan(compute=one), traced["digits-sd"], "amx") for one in (None, "int8"))
    assert exact is not None and integers is not None and integers != exact


def resolved(model: str, isa: str, room: int | None = None, **asked: Any) -> auto.Resolved:
    """What is chosen for a machine with these kernels, with so many bytes or with plenty."""
    here = hardware.probe()
    free = 10**10 if room is None else room + LEAST_MARGIN
    device = hardware.Device(kind="cpu", index=0, name="a cpu", memory_total=free, memory_free=free)
    here = dataclasses.replace(here, devices=(device,), native=isa)
    return auto.resolve(make_request(sdquant.demo.path(model), quant="auto", device="cpu", **asked), here)


def test_what_computes_faster_is_chosen_where_all_fits() -> None:
    assert quant_of(resolved("digits-sd", "not built")) is None
    made = resolved("digits-sd", "amx")
    assert isinstance(quant_of(made), dict) and quant_of(made).keys() == {"unet"}
    assert made.foreseen is not None and made.foreseen < 0.95
    assert f"a step takes about {made.foreseen:.2g} of the unquantized" in made.why


@pytest.mark.parametrize("isa", ["amx", "avx2"])
def test_the_most_precise_of_those_that_are_nearly_as_fast(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ranking.Way] = []
    ordered = ranking.fastest_first

    def watched(ways: Any) -> Any:
        seen.extend(ways)
        return ordered(seen)

    monkeypatch.setattr(ranking, "fastest_first", watched)
    made = resolved("digits-sd", isa)
    good = [
        way for way in seen
        if (way.candidate.worst or USABLE) >= USABLE and way.candidate.verdicts["none"] == "works"
        and way.offload.name == "none"
    ]  # fmt: skip
    fastest = min(way.foreseen or 1.0 for way in good)
    near = [way for way in good if (way.foreseen or 1.0) <= (1 + step_time.NEAR) * fastest]
    best = min(near, key=lambda way: way.candidate.noise)
    assert made.foreseen == best.foreseen < 1 and len(good) > len(near) > 1
    assert {"unet": best.candidate.schemes["model"]} == quant_of(made)


def test_where_less_fits_the_fastest_of_what_fits() -> None:
    eight = sdquant.plan(sdquant.demo.path("digits-flux"), "int8")
    less = resolved("digits-flux", "amx", int(0.6 * eight.bytes) + 14_000_000)  # activations take 13.5 MB
    assert quant_of(less) is not None and less.foreseen is not None
    assert sdquant.plan(sdquant.demo.path("digits-flux"), quant_of(less)).bytes < eight.bytes

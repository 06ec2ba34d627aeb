"""What runs a scheme where nobody named a runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sdquant
from sdquant import backends
from sdquant.compat.runtimes import MEASURED, default_runtime
from sdquant.kernels import cpu

from .machines import VERSIONS

RESULTS = Path(__file__).parents[2] / "bench" / "results"
LIBRARIES = {"bnb": "bitsandbytes", "quanto": "quanto"}
BOTH = [row.name for row in backends.schemes() if row.runtimes[0] == "library"]


@pytest.fixture(params=sorted(MEASURED))
def measured(request: pytest.FixtureRequest) -> str:
    """C kernels that were measured, by their instructions."""
    return str(request.param)


def test_by_device(measured: str) -> None:
    for row in backends.schemes():
        assert default_runtime(row, "cpu", isa=measured) == "plain"
        for device in ("cuda:0", "cuda", "mps", "xpu", "privateuseone:0"):
            assert default_runtime(row, device, isa=measured) == row.runtimes[0]
        slow = row.name in ("bnb-int8", "qint8", "qint4", "qint2", "qfloat8")
        assert default_runtime(row, "cuda:0", isa=measured, triton=True) == ("plain" if slow else row.runtimes[0])
        assert default_runtime(row, "mps", isa=measured, triton=True) == row.runtimes[0]


@pytest.mark.parametrize("isa", [None, "portable"])
def test_without_kernels_that_were_measured(isa: str | None) -> None:
    assert [default_runtime(backends.scheme(name), "cpu", isa=isa) for name in BOTH] == ["library"] * len(BOTH)
    assert default_runtime(backends.scheme("nf4"), "cpu", isa=isa, found=True, versions={}) == "plain"
    assert default_runtime(backends.scheme("nf4"), "cpu", isa=isa, found=True, versions=VERSIONS) == "library"


def test_an_option_of_the_library(measured: str) -> None:
    for text, runtime in (("nf4,compute_dtype=float32", "library"), ("nf4,double_quant", "plain")):
        assert default_runtime(backends.parse(text), "cpu", isa=measured) == runtime


def test_the_same_weights_on_every_machine(sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs them: those that the library has modules for."""
    chosen = []
    for isa in ("avx2", None):
        monkeypatch.setattr(cpu, "isa", lambda isa=isa: isa)
        (unet,) = (part for part in sdquant.plan(sd, "nf4").components if part.name == "unet")
        chosen.append((unet.runtime, {weight.name for weight in unet.weights}))
    assert [runtime for runtime, _ in chosen] == ["plain", "library"]
    assert chosen[0][1] == chosen[1][1]
    (unet,) = (part for part in sdquant.plan(sd, "nf4", runtime="plain").components if part.name == "unet")
    assert {weight.name for weight in unet.weights} > chosen[0][1]  # convolutions too, where it was asked for


@pytest.mark.parametrize("isa", sorted(MEASURED))
def test_what_was_measured(isa: str) -> None:
    """In the results that are kept plain layers take no longer than the library's modules, but for 5 % of noise."""
    rows = json.loads((RESULTS / f"linear-{isa}.json").read_text())["rows"]
    cases: dict[Any, dict[str, float]] = {}
    for row in rows:
        if row.get("seconds"):
            cases.setdefault((row["format"], row["case"]), {})[row["who"]] = row["seconds"]
    compared: dict[str, int] = {}
    for (name, case), by in cases.items():
        library = LIBRARIES.get(backends.parse(name).scheme.backend)
        if library in by:
            assert by["sdquant"] <= 1.05 * by[library], (name, case)
            compared[library] = compared.get(library, 0) + 1
    assert set(compared) == set(LIBRARIES.values()) and min(compared.values()) >= 8

"""What a plan counts for OpenVINO's copy of the weights, against what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sdquant
from sdquant.compat import hardware
from sdquant.nn.openvino.memory_model import CompiledWeight, copied_bytes
from sdquant.planning.estimate import peak_memory

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "openvino_memory.json"
ROWS = [row for row in json.loads(RESULTS.read_text())["rows"] if row["name"].endswith("openvino")]
WITHIN = 0.12


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['case']} {row['name'].split()[0]}")
def test_against_what_was_measured(row: dict[str, Any]) -> None:
    bits = 4 if row["name"].startswith("int4") else 8
    held = []
    for kind, place in (("linear", ()), ("point", (1, 1)), ("conv", (3, 3))):
        some = row["kinds"][kind]
        size = 9 if kind == "conv" else 1
        if some["layers"]:
            each = some["packed"] // some["layers"], some["numbers"] // some["layers"] // size
            held += [CompiledWeight(each[0], bits, (each[1], 1, *place))] * some["layers"]
    foretold = copied_bytes(held, 4 if row["dtype"] == "float32" else 2)
    assert foretold == pytest.approx(row["added"], rel=WITHIN)


def test_the_plan_counts_it() -> None:
    path = sdquant.demo.path("digits-sd")
    plain, compiled = (
        peak_memory.predict(sdquant.plan(path, "int8", runtime=one), hardware.probe()) for one in ("plain", "openvino")
    )
    assert plain.copied == 0 and compiled.weights == plain.weights
    unet = next(part for part in sdquant.plan(path, "int8", runtime="openvino").components if part.name == "unet")
    assert compiled.copied > sum(weight.bytes for weight in unet.weights)
    assert compiled.bytes >= compiled.weights + compiled.copied
    assert compiled.to_dict()["copied"] == compiled.copied


def test_auto_counts_it() -> None:
    """With room for the weights alone there is no way to run it."""
    path = sdquant.demo.path("digits-flux")
    made = sdquant.plan(path, "int8", runtime="openvino")
    budget = 2 * made.bytes
    with pytest.raises(sdquant.BudgetError):
        sdquant.plan(path, "int8", "auto", runtime="openvino", budget=budget)
    assert sdquant.plan(path, "int8", "auto", budget=budget).offload in ("none", "balanced")

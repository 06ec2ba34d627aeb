"""What bench.load measured: quantizing on the fly takes no more time and memory than it may."""

from __future__ import annotations

import json
from typing import Any

from bench import load


def test_the_results_that_are_kept_hold() -> None:
    for size in json.loads(load.RESULTS.read_text())["sizes"].values():
        assert load.missed(size["rows"]) == []


def test_limits() -> None:
    row: dict[str, Any] = {"files": "bf16", "quantized": 3, "bytes": 1e9, "largest": 1e8, "peak": 1.2e9, "cpu": 2.0}
    made = [{**row, "name": "int8"}, {**row, "name": "int8_convrot", "cpu": 4.0}]
    assert load.missed(made) == []
    made[1]["cpu"], made[0]["peak"] = 4.1, 1.21e9
    assert [line.split(":")[0] for line in load.missed(made)] == ["int8_convrot", "int8"]

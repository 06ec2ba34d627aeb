"""The judge of a linear layer's times: what it lets pass and what not."""

from __future__ import annotations

from typing import Any

from bench.linear_gates import judge, lines


def _row(
    scheme: str, who: str, ratio: float | None, rows: int = 1, shape: str = "3072x3072", **more: Any
) -> dict[str, Any]:
    return {"format": scheme, "who": who, "shape": shape, "dtype": "bf16", "rows": rows, "ratio": ratio} | more


def test_a_goal_is_missed_above_its_gate_and_not_measured_without_a_row() -> None:
    verdicts = judge([_row("nf4", "sdquant", 0.46), _row("nf4", "sdquant", 1.2, rows=77)])
    met = {v.case: v.met for v in verdicts if v.goal == "G5"}
    assert met["nf4 3072x3072 bf16 M=1"] is False
    assert met["nf4 3072x3072 bf16 M=77"] is True
    assert met["nf4 3072x12288 bf16 M=1"] is None


def test_the_best_of_the_others_is_what_counts() -> None:
    rows = [
        _row("qint8", "plain", 1.0),
        _row("qint8", "sdquant", 0.9),
        _row("qint8", "quanto", 2.0),
        _row("qint8", "torch int8pack", 0.6),
        _row("qint8", "broken", None),
        _row("qint8", "sdquant compute=int8", 0.1),
    ]
    (found,) = [v for v in judge(rows) if v.goal == "G8"]
    assert (found.against, found.met) == ("torch int8pack", False)
    assert found.value == 0.9 / 0.6
    rows[1]["ratio"] = 0.7
    (found,) = [v for v in judge(rows) if v.goal == "G8"]
    assert found.met


def test_a_call_is_judged_in_microseconds() -> None:
    rows = [_row("qint8", "sdquant", 1.1, shape="128x128", seconds=81e-6)]
    (found,) = [v for v in judge(rows) if v.goal == "G24"]
    assert found.met is False
    assert any(line.startswith("MISSED G24") for line in lines([found]))

"""What bench.better_codes and bench.mixes recorded, held to what docs/mixes.md promises of it."""

from __future__ import annotations

import json
from pathlib import Path

from tools import better_codes as tables

ROOT = Path(__file__).parent.parent


def _rows(file: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads((ROOT / file).read_text(encoding="utf-8"))["rows"]
    return rows


def test_goals_are_met() -> None:
    lines = tables.goals(ROOT).splitlines()[2:]
    assert len(lines) == len(tables.GOALS)
    assert all(line.count(" dB, met") == len(tables.MODELS) for line in lines)


def test_predictions_rank_mixes() -> None:
    for row in _rows(tables.MIXED):
        least = 0.97 if row["name"] == "calibrated" else 0.9
        assert row["mixes"] == 100 and float(str(row["rank correlation"])) >= least

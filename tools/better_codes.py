"""The tables of docs/mixes.md, from what bench.better_codes kept in bench/results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.tables import markdown

FILE = Path("bench/results/better_codes.json")
MODELS = ("digits-flux", "digits-sd", "glyphs-flux")
UNMEASURED = "Not measured yet: `python -m bench.better_codes` does it."
# What sdquant makes by itself; all other rows are formats as other projects make them.
OURS = (",gptq", "auto, ")
CALIBRATED = (",gptq", "statistics", ",imatrix", "NNCF")
# What of ours has to be so many dB above what of the others', and the most bits of each.
GOALS = (
    ("calibrated, over 4.5 bits without calibration", 4.0, (4.55, True), (4.55, False)),
    ("calibrated, over 4.5 bits with their own calibration", 2.0, (4.55, True), (4.55, True)),
    ("calibrated, 0.2 of bf16, over 3 bits", 4.0, (3.25, True), (3.55, None)),
    ("weights alone, over 4.5 bits without calibration", 1.5, (4.55, False), (4.55, False)),
)


def _rows(root: Path) -> list[dict[str, Any]]:
    file = root / FILE
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    return [row for row in rows if "snr" in row]


def table(root: Path) -> str:
    """Every format and mix by its bits on the first model: bits and decibels on each."""
    rows = {(row["name"], row["case"]): row for row in _rows(root)}
    if not rows:
        return UNMEASURED

    def cells(name: str, model: str) -> list[str]:
        row: dict[str, Any] = rows.get((name, model), {})
        return [f"{row['bits']:.2f}", f"{row['snr']:.1f}"] if row else ["-", "-"]

    def order(name: str) -> tuple[float, float]:
        row = next(rows[name, model] for model in MODELS if (name, model) in rows)
        return -row["bits"], -row["snr"]

    names = dict.fromkeys(name for name, model in rows if model in MODELS)
    lines = [
        [f"`{name}`", *(cell for model in MODELS for cell in cells(name, model))] for name in sorted(names, key=order)
    ]
    header = ("scheme", *(f"{what}, {model}" for model in MODELS for what in ("bits", "dB")))
    return markdown(header, lines)


def goals(root: Path) -> str:
    """How far the best of ours is above the best of the others, for each goal, on each model."""
    rows = _rows(root)
    if not rows:
        return UNMEASURED

    def best(model: str, ours: bool, bits: float, calibrated: bool | None) -> dict[str, Any] | None:
        def counts(name: str) -> bool:
            known = any(word in name for word in CALIBRATED)
            return any(word in name for word in OURS) == ours and calibrated in (None, known)

        fit = [row for row in rows if row["case"] == model and row["bits"] <= bits and counts(row["name"])]
        return max(fit, key=lambda row: row["snr"], default=None)

    def cell(model: str, goal: float, mine: tuple[float, bool], others: tuple[float, bool | None]) -> str:
        one, other = best(model, True, *mine), best(model, False, *others)
        if one is None or other is None:
            return "-"
        above = round(one["snr"] - other["snr"], 1)
        return f"{above:+.1f} dB, {'met' if above >= goal else 'missed'} (`{one['name']}`, `{other['name']}`)"

    lines = [
        [title, f"{goal:.1f} dB", *(cell(model, goal, *sides) for model in MODELS)] for title, goal, *sides in GOALS
    ]
    return markdown(("ours over the others' best", "goal", *MODELS), lines)

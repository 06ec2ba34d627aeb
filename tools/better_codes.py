"""The table of docs/mixes.md, from what bench.better_codes kept in bench/results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.tables import markdown

FILE = Path("bench/results/better_codes.json")
MODELS = ("digits-flux", "digits-sd")


def table(root: Path) -> str:
    """Every format and mix by its bits on the first model: bits and decibels on each."""
    if not (root / FILE).exists():
        return "Not measured yet: `python -m bench.better_codes` does it."
    rows = {(row["name"], row["case"]): row for row in json.loads((root / FILE).read_text(encoding="utf-8"))["rows"]}

    def cells(name: str, model: str) -> list[str]:
        row: dict[str, Any] = rows.get((name, model), {})
        return [f"{row['bits']:.2f}", f"{row['snr']:.1f}"] if "snr" in row else ["-", "-"]

    def order(name: str) -> tuple[float, float]:
        row = next(rows[name, model] for model in MODELS if "snr" in rows.get((name, model), {}))
        return -row["bits"], -row["snr"]

    names = dict.fromkeys(name for name, _ in rows if any("snr" in rows.get((name, model), {}) for model in MODELS))
    lines = [
        [f"`{name}`", *(cell for model in MODELS for cell in cells(name, model))] for name in sorted(names, key=order)
    ]
    header = ("scheme", *(f"{what}, {model}" for model in MODELS for what in ("bits", "dB")))
    return markdown(header, lines)

"""The table of memory foretold and taken, from what `bench.plan_memory` kept."""

from __future__ import annotations

import json
from pathlib import Path

from tools.tables import markdown

FILE = Path("bench/results/plan_memory.json")
NAMES = {"flux": "Flux", "sd15": "SD1.5"}


def table(root: Path) -> str:
    """A line for each row that was measured, and where."""
    values = json.loads((root / FILE).read_text(encoding="utf-8"))
    lines = [
        [
            NAMES[row["network"]],
            f"`{row['scheme']}`" if row["scheme"] else "bf16",
            f"{row['budget_share']:.0%}" if row["budget_share"] else "-",
            *(f"{row[name] / 1e6:.0f} MB" for name in ("foretold", "measured")),
            f"{row['of_measured']:.3f}",
            f"{row['unwatched'] / 1e6:.0f} MB",
            f"{row['step']:.2f}",
        ]
        for row in values["rows"]
    ]
    header = ("network", "weights", "budget", "foretold", "measured", "ratio", "without", "step")
    machine = values["machine"]
    return f"Measured on {machine['cpu']} ({machine['native']}).\n\n{markdown(header, lines, left=3)}"

"""The table of steps with balanced offload on a CPU, from what `bench.offload` kept."""

from __future__ import annotations

import json
from pathlib import Path

from tools.tables import markdown

FILE = Path("bench/results/offload.json")


def table(root: Path) -> str:
    """A line for each row that was measured, and where."""
    values = json.loads((root / FILE).read_text(encoding="utf-8"))
    lines = [
        [
            f"{row['budget_share']:.0%}",
            f"{row['streamed_blocks']} of {row['blocks']}" if row["blocks"] else "-",
            f"{row['compute_s']:.3f} s",
            f"{row['transfer_s']:.3f} s" if row["transfer_s"] else "-",
            f"{row['step_s']:.3f} s",
            f"{row['ratio']:.3f}",
        ]
        for row in values["rows"]
    ]
    header = ("budget", "blocks read", "computing", "reading", "a step", "ratio")
    machine = values["machine"]
    return f"Measured on {machine['cpu']} ({machine['native']}).\n\n{markdown(header, lines, left=0)}"

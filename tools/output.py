"""The table of one step's output against other libraries, from what `bench.one_step` kept."""

from __future__ import annotations

import json
from pathlib import Path

from tools.tables import machine_of, markdown

FILE = Path("bench/results/one_step.json")


def one_step(root: Path) -> str:
    """A line for each model and format of a library, and how many of them hold goal G18."""
    values = json.loads((root / FILE).read_text(encoding="utf-8"))
    rows, most = values["rows"], values["most_below"]
    lines = [
        [
            row["case"], f"`{row['scheme']}`", row["name"].rpartition(" ")[0], str(row["seeds"]),
            *(f"{row[name]:.1f}" for name in ("snr", "peer_snr")),
            f"{row['difference']:+.2f} ± {row['standard_error']:.2f}",
            f"{row['layers']}, {row['peer_layers']}",
            f"{row['default_snr']:.1f}, {row['default_layers']}",
        ]
        for row in rows
    ]  # fmt: skip
    held = sum(row["difference"] >= -most for row in rows)
    header = ("model", "format", "library", "seeds", "sdquant", "library's", "difference", "layers", "as by default")
    failed: dict[str, list[str]] = {}
    for text in values["failed"]:
        way, _, form = text.partition(": ")[0].rpartition(" ")
        failed.setdefault(way, []).append(f"`{form}`")
    each = [f"{way} ({', '.join(forms)})" for way, forms in failed.items()]
    said = f"\n\nNot there, since the library fails on a CPU or with the model: {'; '.join(each)}." if failed else ""
    return (
        f"On {machine_of(values)}. Goal G18, at most {most} dB below the library, holds for {held} of {len(rows)}.\n\n"
        f"{markdown(header, lines, left=3)}{said}"
    )

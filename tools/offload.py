"""The tables of steps with balanced offload, from what `bench.offload` kept: from disk, and to a card that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.tables import markdown

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = Path("bench/results")


def table(root: Path) -> str:
    """From disk: a line for each row that was measured, and where."""
    return _table(root, "offload", "reading")


def card_table(root: Path) -> str:
    """To the card, of copies, and how much of the memory that they are from is pinned."""
    return _table(root, "offload-card", "copying", pinned=True)


def _table(root: Path, name: str, moving: str, *, pinned: bool = False) -> str:
    values = json.loads((root / FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    lines = [
        [
            f"{row['budget_share']:.0%}",
            f"{row['streamed_blocks']} of {row['blocks']}" if row["blocks"] else "-",
            *([_share(row)] if pinned else []),
            f"{row['compute_s']:.3f} s",
            f"{row['transfer_s']:.3f} s" if row["transfer_s"] else "-",
            f"{row['step_s']:.3f} s",
            f"{row['ratio']:.3f}",
        ]
        for row in values["rows"]
    ]
    header = ("budget", "blocks moved", *(["pinned"] if pinned else []), "computing", moving, "a step", "ratio")
    machine = values["machine"]
    return f"Measured on {machine['cpu']} ({machine['native']}).\n\n{markdown(header, lines, left=0)}"


def _share(row: Mapping[str, Any]) -> str:
    return "-" if row["pinned"] is None else f"{row['pinned'] / row['weights']:.0%}"

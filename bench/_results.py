"""What benchmarks keep: one JSON file each, with the machine and one row for each thing measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.fidelity import machine, versions


def write(path: Path, bench: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write beside and rename. `rows`: each with "name", "case" and "ratio" (None where it could not be measured)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    kept = {"bench": bench, "machine": machine(), "versions": versions(), "rows": list(rows)}
    beside.write_text(json.dumps(kept, indent=1) + "\n")
    beside.replace(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `write` wrote."""
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows

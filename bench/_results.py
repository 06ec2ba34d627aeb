"""Results as files that `bench.compare` can hold against each other.

A file has "bench" (which one), "machine", "versions" and "rows". A row has "name" (what was measured) and "case" (on
what), which together are its own, and numbers; those of `COMPARED` in `bench.compare` are compared, and of times only
ratios to something in the same run are among them. A file may have more, and a row too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write(
    path: Path, bench: str, rows: Iterable[Mapping[str, Any]], *, machine: Mapping[str, Any] | None = None, **more: Any
) -> None:
    """Write a file, whole or not at all.

    Args:
        machine: default: this one.
        more: what else is to be in the file.

    Raises:
        ValueError: a row has no name or case, or two rows have the same.
    """
    from sdquant.benchmark.running import described
    from sdquant.machine import probe

    rows = [dict(row) for row in rows]
    keys = [(row.get("name"), row.get("case")) for row in rows]
    if any(None in key for key in keys) or len(set(keys)) < len(keys):
        raise ValueError(f"each row has a name and a case of its own: {keys}")
    here = probe() if machine is None else None
    values = {
        "bench": bench,
        "machine": described(here) if here is not None else dict(machine or {}),
        **({"versions": dict(here.versions)} if here is not None else {}),
        **more,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(path)

"""Results as files that `bench.compare` can hold against each other.

A file has "bench" (which one), "machine", "versions" and "rows". A row has "name" (what was measured) and "case" (on
what), which together are its own, and numbers; those of `COMPARED` in `bench.compare` are compared, and of times only
ratios to something in the same run are among them. A row that failed has "error", which says why, and is not compared.
A file may have more, and a row too.
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
        ValueError: a row has no name or case, two rows have the same, or an "error" that is no text.
    """
    from sdquant.compat.hardware import probe
    from sdquant.evaluation.benchmark.runner import described

    rows = [dict(row) for row in rows]
    for row in rows:
        if not isinstance(row.get("error"), (str, type(None))):
            raise ValueError(f"`error` is why a row has no numbers, a text: {row}")
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


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `write` or an older script of this folder wrote.

    Raises:
        ValueError: it is no file of results, or one without rows.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} has no rows of results")
    if "bench" not in values:
        values = values | {"rows": _older(values)}
    rows = values.get("rows")
    if not isinstance(rows, list) or not rows or any("name" not in row or "case" not in row for row in rows):
        raise ValueError(f"{path} has no rows of results with a name and a case")
    return rows


def _older(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of bench.load, bench.fidelity, bench.lora and bench.qat, which have other names for the same."""
    if "sizes" in values:
        return [row for size, part in values["sizes"].items() for row in _loads(size, part["rows"])]
    made = []
    for row in values.get("rows", ()):
        if "psnr" in row:  # fidelity; its ratio is one of bytes
            case = f"{row['model']}, {row['steps']} steps"
            made.append(_some(row, row["scheme"] or "not quantized", case, ("snr", "psnr", "right", "bytes")))
        elif "cosine" in row:  # lora; its ratio is one of effects
            made.append(_some(row, row["scheme"] or "not quantized", row["model"], ("cosine",)))
        elif "rule" in row:  # qat
            made.append(_some(row, row["rule"], row["model"], ("snr", "right", "qat_snr", "qat_right")))
    return made


def _loads(size: str, rows: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """A load's CPU time is a ratio to the library's own way of the same format from the same files."""
    peers = {(row["makes"], row["files"]): row["cpu"] for row in rows if row["peer"]}
    for row in rows:
        made = _some(row, row["name"], f"load {size}", ("bytes", "peak"))
        theirs = None if row["peer"] else peers.get((row["makes"], row["files"]))
        yield made | ({"ratio": row["cpu"] / theirs} if theirs else {})


def _some(row: Mapping[str, Any], name: str, case: str, fields: Iterable[str]) -> dict[str, Any]:
    return {"name": name, "case": case} | {field: row[field] for field in fields if row.get(field) is not None}

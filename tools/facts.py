"""The measured times that `sdquant.planning.estimate.step_time` counts with, from benchmarks in bench/results/.

    python -m tools.facts            write sdquant/planning/estimate/layer_timings.json
    python -m tools.facts --check    exit 1 if it does not hold what the results say

By instruction set, kind of layer and dtype: the nanoseconds of the unquantized layer for each number of its weight, by
rows of activations, and what a scheme's layer takes over that; both geometric means over the shapes that were measured.
And the same of a call of a layer so small that computing is nothing, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sdquant import backends

ROOT = Path(__file__).parent.parent
FACTS = ROOT / "sdquant" / "planning" / "estimate" / "layer_timings.json"
# Later ones give only what earlier ones do not.
FILES = {"linear": ("linear-*.json", "alone-*.json", "rules-*.json"), "conv": ("convolution-*.json",)}
SMALL = {"linear": "128x128", "conv": "32x32x3x3"}
COLUMNS = {"sdquant": "exact", "sdquant compute=int8": "integers"}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def facts(root: Path = ROOT) -> list[dict[str, Any]]:
    """The table, a row for each instruction set, kind of layer and dtype."""
    groups: dict[tuple[str, str, str], dict[tuple[str, str], dict[str, Any]]] = {}
    for kind, patterns in FILES.items():
        for file in (file for pattern in patterns for file in sorted((root / "bench" / "results").glob(pattern))):
            values = json.loads(file.read_text(encoding="utf-8"))
            for row in values["rows"]:
                key = (values["machine"]["native"], kind, DTYPES[row["dtype"]])
                ours = row["who"] != "plain" or not file.name.startswith("rules")  # others tell of plain layers enough
                if row.get("seconds") and ours:
                    groups.setdefault(key, {}).setdefault((row["name"], row["case"]), row)
    return [
        {"isa": isa, "kind": kind, "dtype": dtype, **table}
        for (isa, kind, dtype), rows in sorted(groups.items())
        if len((table := _table(SMALL[kind], list(rows.values())))["rows"]) > 1  # of one point nothing follows
    ]


def _table(small: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    calls, rows = [r for r in rows if r["shape"] == small], [r for r in rows if r["shape"] != small]
    counts = sorted({row["rows"] for row in rows})
    plain = [row for row in rows if row["who"] == "plain"]
    made: dict[str, Any] = {
        "rows": counts,
        "ns": [_short(_mean(_numbers(row) for row in plain if row["rows"] == count)) for count in counts],
    }
    single = min((row["rows"] for row in calls), key=lambda n: abs(n - 64), default=0)
    calls = [row for row in calls if row["rows"] == single]
    us = [1e6 * row["seconds"] for row in calls if row["who"] == "plain"]
    made["call_us"] = _short(statistics.median(us)) if us else None
    for who, column in COLUMNS.items():
        ours = [row for row in rows if row["who"] == who]
        made[column] = {
            str(backends.parse(name)): [
                _ratio(row for row in ours if row["format"] == name and row["rows"] == n) for n in counts
            ]
            for name in sorted({row["format"] for row in ours})
        }
        called = _by_format(calls, who)
        made[f"call_{column}"] = {str(backends.parse(row["format"])): _short(row["ratio"]) for row in called}
    return made


def _by_format(rows: list[dict[str, Any]], who: str) -> Iterator[dict[str, Any]]:
    yield from sorted((row for row in rows if row["who"] == who), key=lambda row: str(row["format"]))


def _numbers(row: dict[str, Any]) -> float:
    """Nanoseconds for each number of the weight."""
    return float(row["seconds"]) * 1e9 / math.prod(int(n) for n in row["shape"].split("x"))


def _ratio(rows: Iterable[dict[str, Any]]) -> float | None:
    found = [row["ratio"] for row in rows if row["ratio"]]
    return _short(_mean(found)) if found else None


def _mean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(values)


def _short(value: float) -> float:
    """Three digits: what was measured is not more exact."""
    return float(f"{value:.3g}")


def text(root: Path = ROOT) -> str:
    """The file, a line for each list."""
    lines = []
    for row in facts(root):
        parts = [f'  "{key}": {_inner(value)}' for key, value in row.items()]
        lines.append(" {\n" + ",\n".join(parts) + "\n }")
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _inner(value: Any) -> str:
    if not isinstance(value, dict) or not value or not isinstance(next(iter(value.values())), list):
        return json.dumps(value)
    return "{\n" + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n  }"


def main() -> None:
    """Write, or look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is another")
    args = parser.parse_args()
    made = text()
    if args.check:
        sys.exit(0 if FACTS.read_text(encoding="utf-8") == made else f"{FACTS}: run python -m tools.facts")
    FACTS.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()

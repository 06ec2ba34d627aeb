"""How long `import sdquant` takes: the cumulative time that `python -X importtime` gives it, in fresh processes.

    python bench/import_time.py [--runs 11] [--json]

The first runs warm the disk's cache. What is reported is the median, in milliseconds of wall clock on this machine, and
the modules that take most of it by themselves. Exit code 1 if the median is above the promised 100 ms.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence

PROMISED_MS = 100.0
WARM_UP = 2
# "import time:   self [us] | cumulative | imported package"; the package is indented by its depth.
_LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)")


def measure() -> tuple[float, dict[str, float]]:
    """One fresh process: cumulative milliseconds of `sdquant`, and own milliseconds of each module below it."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import sdquant"], capture_output=True, text=True, check=True
    )
    rows = [(name, int(own), int(all_)) for own, all_, name in _LINE.findall(done.stderr)]
    at = next(i for i, (name, _, _) in enumerate(rows) if name == "sdquant")
    total = rows[at][2]
    # A module stands after those that it imports: walk back until their own times add up to its cumulative one.
    below: dict[str, float] = {}
    summed = 0
    for name, own, _ in reversed(rows[: at + 1]):
        if summed >= total:
            break
        summed += own
        below[name] = own / 1000
    return total / 1000, below


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and hold the median against the promise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    for _ in range(WARM_UP):
        measure()
    runs = [measure() for _ in range(args.runs)]
    totals = [total for total, _ in runs]
    median = statistics.median(totals)
    slowest = sorted(runs[0][1].items(), key=lambda item: -item[1])[:5]
    if args.json:
        print(json.dumps({"median_ms": median, "min_ms": min(totals), "max_ms": max(totals), "runs": args.runs}))
    else:
        print(f"import sdquant: median {median:.1f} ms ({min(totals):.1f} to {max(totals):.1f}, {args.runs} runs)")
        print("by themselves: " + ", ".join(f"{name} {own:.1f} ms" for name, own in slowest))
    return 0 if median <= PROMISED_MS else 1


if __name__ == "__main__":
    raise SystemExit(main())

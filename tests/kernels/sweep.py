"""Compile configurations of kernels for as long as there is time, those first that say most, and keep what came out.

    python -m tests.kernels.sweep --seconds 3600 --done some.jsonl                   compile what the record lacks
    python -m tests.kernels.sweep --seconds 3600 --done others.jsonl --part 1/2    every second one, beside it
    python -m tests.kernels.sweep --done some.jsonl --done others.jsonl --keep       bench/results/configurations.json

`test_every_configuration` is the same for all of them, which takes hours on two cores. The order: one of each kernel
and kind of weight (or of sizes, where a kernel reads none) on every card, then the others. The record has numbers only:
of each kernel and target those that come first in this order.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "configurations.json"


def ordered() -> Iterator[tuple[str, str, Any]]:
    """A target's name, the family of the configuration, and the configuration: new families first, kernels and
    targets by turns."""
    from .configurations import configurations
    from .offline import TARGETS
    from .test_offline import DAILY

    rows: dict[tuple[bool, str, str], list[Any]] = defaultdict(list)
    for name in DAILY:
        seen: set[str] = set()
        for of in configurations(TARGETS[name]):
            kernel = of.launch.kernel.fn.__name__
            family = f"{kernel} {re.split(r' as |, ', of.name)[0]}"
            rows[family in seen, kernel, name].append((name, family, of))
            seen.add(family)
    for known in (False, True):
        for some in zip_longest(*(found for key, found in rows.items() if key[0] is known)):
            yield from (one for one in some if one is not None)


def kept_in(paths: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def in_record() -> Iterator[tuple[str, str]]:
    """The targets and titles of those that RESULTS has, which are the first of each kernel and target."""
    left = {(row["name"], row["case"]): row["compiled"] for row in json.loads(RESULTS.read_text())["rows"]}
    for name, _, of in ordered():
        kernel = of.launch.kernel.fn.__name__
        left[kernel, name] = left.get((kernel, name), 0) - 1
        if left[kernel, name] >= 0:
            yield name, of.title


def compile_some(seconds: float, done: Path, part: str) -> None:
    """Append a line for each configuration that is compiled: target, title, and what is wrong with it."""
    from .offline import TARGETS
    from .test_offline import faults

    number, of_parts = (int(word) for word in part.split("/"))
    end, known = time.monotonic() + seconds, {(row["target"], row["title"]) for row in kept_in([done])}
    known |= {*in_record()}
    with done.open("a") as file:
        for index, (name, family, of) in enumerate(ordered()):
            if index % of_parts != number or (name, of.title) in known:
                continue
            if time.monotonic() > end:
                return
            try:
                found = [*faults(of, TARGETS[name])]
            except Exception as error:  # what does not compile is a fault too, and the next one is compiled
                found = [f"{of.title}: {type(error).__name__}: {error}"[:500]]
            row = {"target": name, "title": of.title, "family": family, "faults": found}
            file.write(json.dumps(row) + "\n")
            file.flush()


def keep(done: list[Path], to: Path) -> None:
    """Write a row for each kernel and target: configurations and families, of how many, and all faults."""
    from bench._results import write

    made: dict[tuple[str, str], list[str]] = {key: [] for key in in_record()}
    made |= {(row["target"], row["title"]): row["faults"] for row in kept_in(done)}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    faults = {(row["name"], row["case"]): row["faults"] for row in json.loads(RESULTS.read_text())["rows"]}
    families: dict[tuple[str, str], tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for name, family, of in ordered():
        key = (of.launch.kernel.fn.__name__, name)
        row = rows.setdefault(
            key, {"name": key[0], "case": name, "compiled": 0, "of": 0, "faults": [*faults.get(key, ())]}
        )
        row["of"] += 1
        families[key][1].add(family)
        if (name, of.title) in made and row["compiled"] == row["of"] - 1:  # none is left out before it
            row["compiled"] += 1
            row["faults"] += [fault for fault in made[name, of.title] if fault not in row["faults"]]
            families[key][0].add(family)
    for key, (some, every) in families.items():
        rows[key] |= {"families": len(some), "of_families": len(every)}
    write(to, "configurations", rows.values())
    for name in ("compiled", "of", "families", "of_families"):
        print(name, sum(row[name] for row in rows.values()))
    for row in rows.values():
        print(*row["faults"], sep="\n", end="\n" if row["faults"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--done", type=Path, action="append", required=True, help="what was compiled, a line each")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every Nth one, from the Ith on")
    parser.add_argument("--keep", action="store_true", help="compile nothing; write what the files hold")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.keep:
        keep(args.done, args.out)
        return
    with tempfile.TemporaryDirectory() as folder:  # of code that nobody asks for again
        os.environ["TRITON_CACHE_DIR"] = folder
        compile_some(args.seconds, args.done[0], args.part)


if __name__ == "__main__":
    main()

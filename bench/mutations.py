"""Change a few bytes of valid files of all formats, many times: each is read, or refused with a sentence.

    python -m bench.mutations --json bench/results/mutations.json
    python -m bench.mutations --agreement --count 3000 --json bench/results/mutations.json
    python -m bench.mutations --formats torchao_mxfp4.safetensors --count 2000 --json bench/results/mutations.json
    chrt -i 0 python -m bench.mutations --resume run.json --json bench/results/mutations.json

The files, and what is changed, are those of `tests/test_mutations.py`, from other seeds. A file that ends in any other
error, or takes longer than a limit, is kept, and ends the run. Each format has a row. What the file of results says of
formats that were not run again stays there, each row with the machine and the versions of its own run.
With `--agreement`, models in one format each are changed instead (`tests/mutation_agreement.py`): what `plan` and
`verify` call sound has to load. Each difference is printed, and counted in the rows.
A run with `--resume` writes where it is every 500 files, and goes on from there if it was cut off, or a file broke it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sdquant.utils.atomic_write import whole_file
from tests import mutation_agreement, test_mutations

from . import _results

STEP = 500  # files between two looks at the clock
T = TypeVar("T")
_MODELS = 50  # models between two, each of which is loaded


def main(argv: Sequence[str] | None = None) -> None:
    """Run, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="files (default: 100000)")
    parser.add_argument("--formats", nargs="+", default=None, metavar="FILE", help="only these; default: all")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long, with what was done")
    parser.add_argument("--seed", type=int, default=None, help="to repeat a run")
    parser.add_argument("--resume", type=Path, default=None, help="file of a run to go on with, or to begin")
    parser.add_argument("--agreement", action="store_true", help="compare what is said of models with what loads")
    parser.add_argument("--keep", type=Path, default=Path(), help="folder for a file that breaks something")
    parser.add_argument("--json", type=Path, default=None, help="file to write, or to write rows of formats into")
    args = parser.parse_args(argv)
    if args.agreement:
        _compare(args)
        return
    seed, done, seen = _progress(args.resume, args.seed, args.formats)
    test_mutations.listen()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        originals = _chosen(test_mutations.sound(Path(folder), encoders=True), args.formats)
        while done < args.count and (args.minutes is None or time.monotonic() - start < 60 * args.minutes):
            step = min(STEP, args.count - done)
            found = test_mutations.outcomes(originals, Path(folder), f"{seed} {done}", step, args.keep)
            for name, counts in found.items():
                seen.setdefault(name, Counter()).update(counts)
            done += step
            if args.resume is not None:
                values = {"seed": seed, "done": done, "formats": args.formats, "seen": seen}
                with whole_file(args.resume) as file:
                    file.write(json.dumps(values).encode())
    for name, counts in sorted(seen.items()):
        print(f"{name}: {dict(counts)}")
    print(f"{done} files of {len(seen)} formats, seed {seed}")
    if args.json is not None:
        rows = [
            {"name": "mutations", "case": name, "seed": seed, "count": counts.total(), **counts}
            for name, counts in sorted(seen.items())
        ]
        _results.write(args.json, "mutations", [*kept(args.json, seen), *rows])


def _chosen(originals: dict[str, T], formats: Sequence[str] | None) -> dict[str, T]:
    """Return those of these names; all without names."""
    unknown = set(formats or ()) - originals.keys()
    if unknown:
        sys.exit(f"no file is named {', '.join(sorted(unknown))}: there are {', '.join(sorted(originals))}")
    return {name: one for name, one in originals.items() if formats is None or name in formats}


def _compare(args: argparse.Namespace) -> None:
    """Count how often what `plan` and `verify` say of a changed model is what `load_model` does."""
    seed = random.randrange(2**32) if args.seed is None else args.seed
    start, totals, tried = time.monotonic(), dict[str, Counter[str]](), 0
    with tempfile.TemporaryDirectory() as folder:
        models = _chosen(mutation_agreement.originals(Path(folder)), args.formats)
        while tried < args.count and (args.minutes is None or time.monotonic() - start < 60 * args.minutes):
            step = min(_MODELS, args.count - tried)
            results, differences = mutation_agreement.outcomes(models, Path(folder), f"{seed} {tried}", step)
            for name, counts in results.items():
                totals.setdefault(name, Counter()).update(counts)
            print(*differences, sep="\n", end="\n" * bool(differences), flush=True)
            tried += step
            rows = [
                {"name": "agreement", "case": name, "seed": seed, "count": counts.total(), **counts}
                for name, counts in sorted(totals.items())
            ]
            if args.json is not None:
                _results.write(args.json, "mutations", [*kept(args.json, totals), *rows])
    print(f"{tried} models of {len(totals)} formats, seed {seed}: {dict(sum(totals.values(), Counter()))}")


def _progress(
    path: Path | None, seed: int | None, formats: Sequence[str] | None
) -> tuple[int, int, dict[str, Counter[str]]]:
    """The seed of a run, the number of files that it has tried, and what came of those of each format."""
    if path is None or not path.exists():
        return random.randrange(2**32) if seed is None else seed, 0, {}
    values = json.loads(path.read_text(encoding="utf-8"))
    if seed not in (None, values["seed"]) or formats != values["formats"]:
        sys.exit(f"{path} is of a run of other formats, or from another seed: give it as it began")
    return values["seed"], values["done"], {name: Counter(counts) for name, counts in values["seen"].items()}


def kept(path: Path, seen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that a file of results has of other formats, each with what its run ran on. seen: the formats of now.

    A row of many formats, its "formats", goes when all of them have rows of their own.
    """
    if not path.exists():
        return []
    values = json.loads(path.read_text(encoding="utf-8"))
    now = seen.keys() | {row["case"] for row in values["rows"]}
    rows = [row for row in values["rows"] if row["case"] not in seen and not now.issuperset(row.get("formats", [""]))]
    return [{**row, **{key: row.get(key, values[key]) for key in ("machine", "versions")}} for row in rows]


if __name__ == "__main__":
    main()

"""Change a few bytes of valid files of all formats, 100,000 times: each is read, or refused with a sentence.

    python -m bench.mutations --json bench/results/mutations.json

The files, and what is changed, are those of `tests/test_mutations.py`, from other seeds. A file that ends in any other
error, or takes longer than a limit, is kept, and ends the run.
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests import test_mutations

from . import _results

STEP = 500  # files between two looks at the clock


def main() -> None:
    """Run, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="files (default: 100000)")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long, with what was done")
    parser.add_argument("--seed", type=int, default=None, help="to repeat a run")
    parser.add_argument("--keep", type=Path, default=Path(), help="folder for a file that breaks something")
    parser.add_argument("--json", type=Path, default=None, help="file to write")
    args = parser.parse_args()
    seed = random.randrange(2**32) if args.seed is None else args.seed
    signal.signal(signal.SIGALRM, test_mutations.rang)
    seen, done, start = Counter[str](), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        originals = test_mutations.sound(Path(folder))
        while done < args.count and (args.minutes is None or time.monotonic() - start < 60 * args.minutes):
            step = min(STEP, args.count - done)
            seen += test_mutations.outcomes(originals, Path(folder), f"{seed} {done}", step, args.keep)
            done += step
    print(f"{done} files of {len(originals)} formats, seed {seed}: {dict(seen)}")
    if args.json is not None:
        row = {"name": "mutations", "case": f"{len(originals)} formats", "seed": seed, "count": done, **seen}
        _results.write(args.json, "mutations", [row], formats=sorted(originals))


if __name__ == "__main__":
    main()

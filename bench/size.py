"""What a plan takes of the size that it was asked for: `python -m bench.size MODELS`.

The model has FLUX.1's width and 1.17 billion weights, generated in the folder MODELS if it is not there, and so are
statistics. Errors are measured; nothing is loaded or drawn. Results are kept in bench/results/size.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sdquant
from bench import _full_size_statistics, models
from bench._results import read, write

RESULTS = Path(__file__).parent / "results" / "size.json"
NAME = "flux-1.2b"
SHARES = (0.17, 0.18, 0.2, 0.24, 0.28, 0.33, 0.4, 0.5, 0.52, 0.6, 0.75, 0.9)  # of bf16
CASES = {"weights alone": False, "statistics": True}


def main() -> None:
    """Plan, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="the folder of the model's folder")
    parser.add_argument("--case", choices=CASES, help="this one alone; rows measured before stay")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    folder = models.folder(NAME, args.models)
    kept = {(row["name"], row["case"]): row for row in read(args.json)} if args.json.exists() else {}
    bf16 = sdquant.plan(folder).bytes
    for case in (args.case,) if args.case else CASES:
        stats = _full_size_statistics.statistics(folder) if CASES[case] else None
        for share in SHARES:
            asked = int(share * bf16)
            plan = sdquant.plan(folder, quant="auto", size=asked, quant_stats=stats)
            row = {"name": f"{share:g} of bf16", "case": case, "asked": asked, "bytes": plan.bytes}
            print(case, row["name"], asked, plan.bytes, f"{plan.bytes / asked:.5f}", flush=True)
            kept[row["name"], case] = row
        write(args.json, "size", list(kept.values()), model=NAME)


if __name__ == "__main__":
    main()

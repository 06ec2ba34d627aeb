"""What a plan takes of the size that it was asked for: `python -m bench.size MODELS`.

The model has FLUX.1's width and 1.17 billion weights, generated in the folder MODELS if it is not there, and so are
statistics. Errors are measured; nothing is loaded or drawn. Results are kept in bench/results/size.json.

    python -m bench.size MODELS --case folder     what `sdquant quantize` writes of the digits models, all files

These are so small that names and tokenizers are a part of them that counts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sdquant
from bench import _full_size_statistics, models
from bench._results import read, write
from sdquant.cli import main as run_command

RESULTS = Path(__file__).parent / "results" / "size.json"
NAME = "flux-1.2b"
SHARES = (0.17, 0.18, 0.2, 0.24, 0.28, 0.33, 0.4, 0.5, 0.52, 0.6, 0.75, 0.9)  # of bf16
CASES = {"weights alone": False, "statistics": True}
FOLDER = "folder"  # a case of its own
FOLDERS = {"digits-sd": (2.1, 2.2, 2.5, 3.0, 3.5), "digits-flux": (3.3, 4.0, 5.0, 6.5, 8.0)}  # MB


def main() -> None:
    """Plan, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="the folder of the model's folder")
    parser.add_argument("--case", choices=(*CASES, FOLDER), help="this one alone; rows measured before stay")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    kept = {(row["name"], row["case"]): row for row in read(args.json)} if args.json.exists() else {}
    for case in (args.case,) if args.case else (*CASES, FOLDER):
        for row in _written() if case == FOLDER else _planned(args.models, case):
            share = row["bytes"] / row["asked"]
            print(case, row["name"], row["asked"], row["bytes"], f"{share:.5f}", flush=True)
            kept[row["name"], case] = row
        write(args.json, "size", list(kept.values()), model=NAME)


def _planned(place: Path, case: str) -> Iterator[dict[str, Any]]:
    folder = models.folder(NAME, place)
    bf16 = sdquant.plan(folder).bytes
    stats = _full_size_statistics.statistics(folder) if CASES[case] else None
    for share in SHARES:
        asked = int(share * bf16)
        plan = sdquant.plan(folder, quant="auto", size=asked, quant_stats=stats)
        yield {"name": f"{share:g} of bf16", "case": case, "asked": asked, "bytes": plan.bytes}


def _written() -> Iterator[dict[str, Any]]:
    for model, sizes in FOLDERS.items():
        for size in sizes:
            with tempfile.TemporaryDirectory() as work:
                asked, out = int(size * 1e6), Path(work) / "out"
                words = ["-q", f"auto,size={asked}", "-o", str(out), "--no-progress"]
                if run_command(["quantize", model, *words]):
                    raise SystemExit(f"{model} was not written")
                nbytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
            yield {"name": f"{model}, {size:g} MB", "case": FOLDER, "asked": asked, "bytes": nbytes}


if __name__ == "__main__":
    main()

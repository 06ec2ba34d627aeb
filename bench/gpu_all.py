"""All there is to learn about sdquant on a card, in one command of some ten minutes.

    python -m bench.gpu_all --json bench/results/gpu-h100.json   on a card
    python -m bench.gpu_all --device cpu --small                 the same steps without one; its numbers mean nothing
    python -m bench.gpu_all --only card --only right             these phases alone (repeat)

Each phase runs in a process of its own until its deadline; a fault of the device in one is none in the next. The file
is written again after every phase, with all rows that were measured by then, so that whatever ends the run keeps them.
A row that failed has "error". The exit status is 1 if a row of the phases `right` and `behaviour` has one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench._cards import present
from bench._results import write

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Phase:
    """A module of `bench.gpu` and the seconds it may take."""

    name: str
    seconds: float


PHASES = (
    Phase("card", 40), Phase("right", 130), Phase("behaviour", 260), Phase("layers", 150), Phase("flux", 150),
    Phase("convolutions", 60), Phase("offloading", 75),
)  # fmt: skip
JUDGED = ("right", "behaviour")  # phases whose rows say whether something is wrong


def run_phase(phase: Phase, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one phase, in a process that is ended with all of its own at the deadline."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        command = [
            sys.executable, "-m", "bench.gpu_all", "--phase", phase.name, "--rows", str(path), "--device", args.device,
            *(["--small"] if args.small else []),
        ]  # fmt: skip
        begin = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status: int | None = process.wait(phase.seconds * args.patience)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        row: dict[str, Any] = {"name": phase.name, "case": "phase", "seconds": time.monotonic() - begin}
        if status is None:
            row["error"] = f"it was ended at its deadline after {phase.seconds * args.patience:.0f} s"
        elif status:
            row["error"] = f"it ended with status {status}: {log.read_text(errors='replace')[-1500:]}"
        return [*({**one, "phase": phase.name} for one in rows), row]


def measure_phase(name: str, device: torch.device, small: bool, path: Path) -> None:
    """Run one phase in this process, a line of JSON for each row as soon as it is there."""
    module = importlib.import_module(f"bench.gpu.{name}")
    with path.open("a", encoding="utf-8") as file:
        for row in module.measure(device, small):
            file.write(json.dumps(row) + "\n")
            file.flush()


def shown(row: dict[str, Any]) -> str:
    """A row as a line."""
    numbers = {key: value for key, value in row.items() if isinstance(value, (int, float)) and key != "phase"}
    text = "  ".join(f"{key} {value:.4g}" for key, value in numbers.items())
    return f"{row['case']:24} {row['name']:60} {text}  {row.get('error') or ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that the steps run at all")
    parser.add_argument("--only", action="append", choices=[phase.name for phase in PHASES], help="a phase (repeat)")
    parser.add_argument("--patience", type=float, default=1.0, help="times the deadlines (default 1)")
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not present(args.device):
        return 2
    if args.phase:
        measure_phase(args.phase, torch.device(args.device), args.small, args.rows)
        return 0
    rows: list[dict[str, Any]] = []
    for phase in PHASES:
        if args.only and phase.name not in args.only:
            continue
        found = run_phase(phase, args)
        rows += found
        for row in found:
            print(shown(row), flush=True)
        if args.json:
            write(args.json, "gpu-all", rows)
    return 1 if any(row.get("error") for row in rows if row.get("phase") in JUDGED) else 0


if __name__ == "__main__":
    sys.exit(main())

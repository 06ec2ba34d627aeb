"""The tests that need a card, and the tables of offloading computed there: a row for each that did not pass."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu import reports

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Run:
    """Tests of some files with some marks, and the seconds they may take."""

    name: str
    seconds: float
    marks: str
    paths: tuple[str, ...]


RUNS = (
    Run(
        "marked gpu", 130, "gpu",
        ("tests/kernels/test_on_card.py", "tests/offload/test_gpu.py", "tests/kernels/test_fp8.py",
         "tests/kernels/test_gguf_fields.py", "tests/rules/test_float8.py", "tests/hosts/test_forge.py"),
    ),
    Run(
        "offload", 150, "slow or not slow",
        ("tests/offload/test_changes.py", "tests/offload/test_training.py", "tests/offload/test_threads.py"),
    ),
)  # fmt: skip
SMALL = (
    Run("marked gpu", 100, "gpu", ("tests/kernels/test_gguf_fields.py",)),
    Run("offload", 300, "not slow", ("tests/offload/test_threads.py",)),
)
MOST_PROCESSES = 15


def measure(device: torch.device, small: bool) -> Iterator[dict[str, Any]]:
    """A row for each run with its counts, and one for each test of it that failed."""
    for run in SMALL if small else RUNS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "reports.jsonl"
            status, printed = _ran(run, device, path, 1 if small else min(MOST_PROCESSES, os.cpu_count() or 1))
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        yield from _rows(run, [json.loads(line) for line in lines], status, printed)


def _ran(run: Run, device: torch.device, path: Path, processes: int) -> tuple[int | None, str]:
    """Run pytest; its status, None if it was ended at its deadline, and what it printed."""
    command = [
        sys.executable, "-m", "pytest", "-m", run.marks, "-n", str(processes), "--dist", "load", "-p",
        "bench.gpu.reports", "-p", "no:cacheprovider", "-o", "filterwarnings=", *run.paths,
    ]  # fmt: skip
    environment = {
        **os.environ, "SDQUANT_TEST_DEVICE": device.type, "OMP_NUM_THREADS": "1", reports.PATH: str(path),
    }  # fmt: skip
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=run.seconds)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _rows(run: Run, found: list[dict[str, Any]], status: int | None, printed: str) -> Iterator[dict[str, Any]]:
    counts = Counter(row["outcome"] for row in found)
    whole: dict[str, Any] = {"name": run.name, "case": "tests", **counts}
    if status is None:
        whole["error"] = f"it was ended after {run.seconds:.0f} s"
    elif status not in (0, 1):
        whole["error"] = f"pytest ended with status {status}: {printed[-1500:]}"
    elif counts["failed"]:
        whole["error"] = f"{counts['failed']} of {len(found)} tests failed"
    yield whole
    for row in found:
        if row["outcome"] == "failed":
            yield {"name": row["test"], "case": run.name, "error": row["error"], "text": row["text"]}
    reasons = Counter(row["error"] for row in found if row["outcome"] == "skipped")
    for reason, number in sorted(reasons.items()):
        yield {"name": reason, "case": f"{run.name}, skipped", "tests": number}

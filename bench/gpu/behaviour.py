"""The tests that need a card, and the tables of offloading computed there: a row for each that did not pass."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Names, paths and marks of each run. The tables' slow cells are in the second.
RUNS = {
    "marked gpu": (
        "gpu", "tests/kernels/test_on_card.py", "tests/offload/test_gpu.py", "tests/kernels/test_fp8.py",
        "tests/kernels/test_fields.py", "tests/rules/test_float8.py", "tests/hosts/test_forge.py",
    ),
    "offload": (
        "slow or not slow", "tests/offload/test_changes.py", "tests/offload/test_training.py",
        "tests/offload/test_threads.py",
    ),
}  # fmt: skip
SMALL = {
    "marked gpu": ("gpu", "tests/kernels/test_fields.py"),
    "offload": ("not slow", "tests/offload/test_threads.py"),
}
MOST_PROCESSES = 14
_LEFT_OUT = ("skipped",)


def measure(device: torch.device, small: bool) -> Iterator[dict[str, Any]]:
    """A row for each run with its counts, and one for each test of it that failed."""
    for name, (marks, *paths) in (SMALL if small else RUNS).items():
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            processes = min(MOST_PROCESSES, os.cpu_count() or 1)
            command = [
                sys.executable, "-m", "pytest", "-m", marks, "-n", str(1 if small else processes), "-p",
                "no:cacheprovider", "-o", "filterwarnings=", "--dist", "load", f"--junit-xml={report}", *paths,
            ]  # fmt: skip
            environment = {**os.environ, "SDQUANT_TEST_DEVICE": device.type, "OMP_NUM_THREADS": "2"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if not report.exists():
                yield {"name": name, "case": "tests", "error": (done.stdout + done.stderr)[-2000:]}
                continue
            yield from _rows(name, report)


def _rows(name: str, report: Path) -> Iterator[dict[str, Any]]:
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    bad = [case for case in suite.iter("testcase") if any(child.tag in ("failure", "error") for child in case)]
    row: dict[str, Any] = {"name": name, "case": "tests", **counts, "seconds": float(suite.attrib["time"])}
    yield row | ({"error": f"{len(bad)} of {counts['tests']} tests failed"} if bad else {})
    for case in bad:
        child = next(child for child in case if child.tag in ("failure", "error"))
        what = f"{case.attrib['classname']}::{case.attrib['name']}"
        yield {"name": what, "case": name, "error": child.attrib.get("message", "")[:600], "text": child.text[-2500:]}
    reasons = [child.attrib.get("message", "") for case in suite.iter("testcase") for child in case.iter("skipped")]
    for reason in sorted(set(reasons)):
        yield {"name": f"skipped: {reason}"[:200], "case": name, "tests": reasons.count(reason)}

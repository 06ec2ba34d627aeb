"""A plugin of pytest that writes each test's outcome to a file as soon as it is there: what a killed run leaves.

`python -m pytest -p bench.gpu.reports` with SDQUANT_REPORTS set to the file's path.
"""

from __future__ import annotations

import json
import os
from typing import Any

PATH = "SDQUANT_REPORTS"


def pytest_runtest_logreport(report: Any) -> None:
    """Write a line for a test's call, or for what stopped it before or after."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        row |= {"error": getattr(crash, "message", "")[:600] or report.longreprtext[-600:]}
        row |= {"text": report.longreprtext[-3000:]}
    elif report.skipped:
        row["error"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    with open(os.environ[PATH], "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")

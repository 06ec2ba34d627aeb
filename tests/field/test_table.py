"""Every piece has its tests: a test that is renamed or goes is missed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..fast import COLLECTED
from .table import PIECES, TESTS, rows_of

ROOT = Path(__file__).parents[2]
# What the reports call failed or rough.
REPORTS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 15, 16, 17, 18, 21, 22, 23, 24, 25, 26, 27, 28, 29)


def test_every_report_has_a_row() -> None:
    assert {row.number for row in PIECES} == {
        *(f"T{number:02}" for number in REPORTS), *(f"Q{number}" for number in range(1, 10)), "S"
    }  # fmt: skip
    assert all(row.tests for row in PIECES)
    assert len({(row.number, row.what) for row in PIECES}) == len(PIECES)


def test_every_test_of_a_row_is_there(pytestconfig: pytest.Config) -> None:
    """Of the files that were collected whole; the slow run asks for all."""
    if any("::" in arg for arg in pytestconfig.args):
        pytest.skip("of some files only a part was asked for")
    nodes = pytestconfig.stash[COLLECTED]
    files = {node.partition("::")[0] for node in nodes}
    there = {test for node in nodes for test in rows_of(node)}
    assert sorted(test for test in TESTS - there if test.partition("::")[0] in files) == []


def test_the_command_runs_them_and_no_others() -> None:
    """As pytest collects them by the marker that conftest gives them."""
    files = sorted({node.partition("::")[0] for node in TESTS})
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    done = subprocess.run([*words, "-m", "field", *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = {line for line in done.stdout.splitlines() if line.startswith("tests/")}
    assert sorted(TESTS - {test for node in collected for test in rows_of(node)}) == []
    assert sorted(node for node in collected if not rows_of(node)) == []

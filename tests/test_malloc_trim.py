"""Freed memory goes back to the system while a model computes, once it is much."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("malloc_trim_cases.py")


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="only glibc has malloc_trim")
def test_freed_memory_goes_back() -> None:
    """The cases measure the memory of a process, into which threads and garbage of other tests would reach."""
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", str(CASES)]
    outcome = subprocess.run(command, capture_output=True, text=True, cwd=CASES.parents[1], timeout=1800)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr

"""Libraries that tests run in processes of their own, from a folder beside the environment (see CONTRIBUTING.md)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PLACE = Path(os.environ.get("SDQUANT_TEST_LIBRARIES", Path(__file__).parents[1] / ".libraries"))


def has(name: str) -> bool:
    """Whether a library is there, by the name that it is imported by."""
    return (PLACE / name).is_dir() or importlib.util.find_spec(name) is not None


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test where a library is not."""
    return pytest.mark.skipif(not has(name), reason=f"{name} is not in .libraries (see CONTRIBUTING.md)")


HAS_TORCHAO = has("torchao")
NEEDS_TORCHAO = needs("torchao")


def run_script(name: str, *arguments: str) -> Any:
    """What a script of this folder prints as JSON in its last line, with these libraries on its path."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PLACE)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])

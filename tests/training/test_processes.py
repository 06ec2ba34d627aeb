"""One training in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sdquant.training.record import read

if TYPE_CHECKING:
    from .conftest import Short


@pytest.mark.slow
def test_two_processes_train_as_one_does(short: Short, written: Callable[..., Path], tmp_path: Path) -> None:
    """Two with batches of two draw the examples of one with batches of four: the losses differ by rounding."""
    short(run_name="one", per_device_batch_size=4)
    file = written(run_name="two", per_device_batch_size=2, checkpoint_every=2, max_train_steps=4)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "sdquant", "train"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [*words, str(file), "--json"], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["processes"] == 2
    one, two = (read(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    assert [line.step for line in two] == [line.step for line in one]
    for a, b in zip(one, two, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-3) and b.grad_norm == pytest.approx(a.grad_norm, rel=1e-2)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == sorted(
        path.name for path in (tmp_path / "one").iterdir()
    )
    again = subprocess.run(
        [*words, str(file), "resume=step-2", "run_name=two"],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("the first 2 before") == 1
    assert read(tmp_path / "two/log.jsonl") == two

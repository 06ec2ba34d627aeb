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
import torch

from sdquant.errors import SettingsError
from sdquant.training.metrics_log import read

if TYPE_CHECKING:
    from .conftest import Short


@pytest.mark.slow
def test_two_processes_train_as_one_does(short: Short, written: Callable[..., Path], tmp_path: Path) -> None:
    """Two with batches of two draw the examples of one with batches of four: the losses differ by rounding."""
    short(run_name="one", per_device_batch_size=4)
    # No device is named: on a machine without a card the processes are to find each other all the same.
    device = "cpu" if torch.cuda.is_available() else None
    file = written(run_name="two", per_device_batch_size=2, checkpoint_every=2, max_train_steps=4, device=device)
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


def test_processes_that_accelerate_lets_train_alone_are_refused(
    short: Short, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on Apple's GPUs, which accelerate has no processes for: seen here by one process that is told of another."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sdquant.compat.hardware.default_device", lambda _: "mps")
    with pytest.raises(SettingsError, match="accelerate lets each of them train alone"):
        short(run_name="alone", device=None)
    assert not (tmp_path / "alone").exists()

"""Ctrl-C in `sdquant calibrate`: a real process, or several, stopped in the middle of its images and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdquant.cli import main
from sdquant.training import digits

from ..test_distributed import ROOT

PROMPTS = [word for digit in range(8) for word in ("--prompt", digits.prompt(digit))]
WORDS = ["calibrate", "digits-sd", "--components", "unet", "--steps", "2", *PROMPTS]
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def start(count: int, out: Path) -> subprocess.Popen[str]:
    """Start the command, in a process group of its own as a shell does it."""
    launcher = [] if count == 1 else [*LAUNCHER, str(count)]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "sdquant", *WORDS, "-o", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def interrupt(process: subprocess.Popen[str], count: int, folder: Path) -> str:
    """Press Ctrl-C when each process has kept its first image; return what they said."""
    end = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < end and len(list(folder.glob("*.partial"))) < count:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=120)[1]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_stopped_and_started_again(count: int, tmp_path: Path) -> None:
    """No half-written file, no traceback; the second run takes up each process's own images, and ends in the bits of a
    run that nobody stopped."""
    one, folder = tmp_path / "one.safetensors", tmp_path / "stopped"
    folder.mkdir()
    out = folder / "out.safetensors"
    assert main([*WORDS, "-o", str(one)]) == 0
    process = start(count, out)
    said = interrupt(process, count, folder)
    assert process.returncode == (130 if count == 1 else 1), said
    partial = [f"out.safetensors.rank{rank}of{count}.partial" for rank in range(count)]
    assert sorted(file.name for file in folder.iterdir()) == partial
    assert said.count("run the same command again to resume") == 1, said  # the first process tells it for all
    assert count > 1 or "Traceback" not in said  # torchrun has its own to show
    again = start(count, out)
    said = again.communicate(timeout=240)[1]
    assert again.returncode == 0, said
    assert said.count("images are already done") == 1, said
    assert out.read_bytes() == one.read_bytes()
    assert list(folder.iterdir()) == [out]

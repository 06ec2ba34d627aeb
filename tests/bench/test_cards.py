"""The benchmarks for cards run, on a CPU and a small model: what a session with a card will start."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_all, gpu_flux, gpu_linear, gpu_offload
from bench.gpu import flux

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "more", "names"),
    [
        (gpu_flux.main, ["--rounds", "1", "--only", "nf4"], {"plain bf16", "nf4 · sdquant"}),
        (gpu_linear.main, ["--rounds", "1", "--only", "q8_0", "--rows", "4"], {"plain bf16", "sdquant"}),
        (gpu_offload.main, ["--rounds", "1"], {"bf16, budget 50%", "nf4, budget 50%"}),
    ],
    ids=["flux", "linear", "offload"],
)
def test_every_row_is_there(
    main: Callable[[], int], more: list[str], names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu", "--size", "128", "--json", str(file), *more])
    assert main() == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    measured = {row.get("who") or row["name"] for row in rows if not row.get("error")}
    assert names <= measured


def everything(tmp_path: Path, *phases: str) -> dict[str, list[dict[str, Any]]]:
    """What `bench.gpu_all` keeps of these phases, by phase, gone through on a CPU."""
    file = tmp_path / "all.json"
    words = [word for phase in phases for word in ("--only", phase)]
    command = [sys.executable, "-m", "bench.gpu_all", "--device", "cpu", "--small", "--patience", "6", *words]
    done = subprocess.run([*command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        found.setdefault(row.get("phase", row["name"]), []).append(row)
    return found


def test_one_command_has_a_row_for_each_rate(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in everything(tmp_path, "card")["card"]}
    assert {"device", "bf16 product", "int8 product", "copy on the device", "card"} <= set(rows)
    assert rows["bf16 product"]["rate"] > 0 and "error" not in rows["card"]


@pytest.mark.slow
def test_one_command_goes_through_every_phase(tmp_path: Path) -> None:
    found = everything(tmp_path)
    assert list(found) == [phase.name for phase in gpu_all.PHASES]
    assert [row for rows in found.values() for row in rows if row.get("error")] == []
    assert {row["name"] for row in found["right"]} >= {"kernels", "what backends encode"}
    assert all(row["looked"] for row in found["right"] if row["case"] == "right")
    assert {row["case"] for row in found["behaviour"]} >= {"tests"}
    assert {row["name"] for row in found["flux"]} >= set(flux.VARIANTS)
    assert {row["name"] for row in found["offloading"]} >= {"bf16, budget 50%", "nf4, budget 50%"}


def test_a_phase_that_takes_too_long_is_ended_and_says_so() -> None:
    args = argparse.Namespace(device="cpu", small=True, patience=1.0)
    *_, row = gpu_all.run_phase(gpu_all.Phase("card", 0.05), args)
    assert row["name"] == "card" and "ended at its deadline" in row["error"]

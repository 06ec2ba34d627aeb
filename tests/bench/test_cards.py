"""The benchmarks for cards run, on a CPU and a small model: what a session with a card will start."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import gpu_flux, gpu_linear, gpu_offload


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

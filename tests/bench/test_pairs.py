"""What bench.pairs measured: rotations and branches cost no more than they may."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bench import pairs
from bench._results import read

RESULTS = sorted(pairs.RESULTS.parent.glob("pairs-*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_results_that_are_kept_hold(path: Path) -> None:
    rows = read(path)
    assert pairs.missed(rows) == []
    assert {row["name"] for row in rows} == {pair.name for pair in pairs.PAIRS}


def test_a_limit_is_of_many_rows() -> None:
    pair = pairs.PAIRS[0]
    row = {"name": pair.name, "case": "", "rows": pair.least, "dtype": "bf16", "ratio": pair.limit + 0.01}
    assert len(pairs.missed([row])) == 1
    assert pairs.missed([{**row, "rows": pair.least - 1}, {**row, "ratio": pair.limit}, {**row, "name": "other"}]) == []


def test_a_layer_without_its_branch_has_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "SIZE", 128)
    floats = nn.Linear(128, 128, bias=False).requires_grad_(False)
    made: dict[str, pairs.Packed] = {}
    names = ["svdquant_w4a4 with its branch", "svdquant_w4a4"]
    runs = {name: pairs.layer(name, floats, made) for name in names}
    x = torch.randn(5, 128)
    smooth, down, up = (made["svdquant_w4a4"].parts[name].float() for name in ("smooth", "down", "up"))
    with_branch, without = (runs[name](x) for name in names)
    divided = runs[names[1]](x / smooth)
    assert not torch.equal(with_branch, without)
    assert (with_branch - divided - x @ down @ up.T).norm() < 1e-5 * with_branch.norm()
    assert set(pairs.times(runs, x, 3)) == set(names)

"""bench.one_step, on a shipped model with few seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import one_step


@pytest.mark.slow
def test_a_library_that_quantizes_fewer_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The comparison is with those layers alone that both quantize; what a library cannot do is told."""
    monkeypatch.setitem(one_step.SEEDS, "digits-sd", 3)
    failed: list[str] = []
    rows = [*one_step.measure("digits-sd", tmp_path, ["qint8", "q8_0"], tmp_path, failed)]
    assert [(row["name"], row["case"], row["seeds"]) for row in rows] == [("diffusers quanto int8", "digits-sd", 3)]
    (row,) = rows
    assert row["layers"] == row["peer_layers"] < row["default_layers"]
    assert row["default_snr"] < row["snr"] and abs(row["difference"]) < 1.5
    assert [text.partition(":")[0] for text in failed] == ["digits-sd diffusers GGUF q8_0"]

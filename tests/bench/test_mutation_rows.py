"""What `bench.mutations` keeps of earlier runs when it ran over some formats."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench import mutations

OLD = {
    "machine": {"cpu": "old"}, "versions": {"torch": "2.6"},
    "rows": [
        {"name": "mutations", "case": "2 formats", "formats": ["a", "b"], "count": 10},
        {"name": "mutations", "case": "c", "count": 3, "versions": {"torch": "2.5"}},
    ],
}  # fmt: skip


def test_rows_of_other_formats_stay_with_what_they_ran_on(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    assert mutations.kept(file, {"a": 1}) == []
    file.write_text(json.dumps(OLD))
    both, alone = mutations.kept(file, {"a": 1})
    assert both == {**OLD["rows"][0], "machine": {"cpu": "old"}, "versions": {"torch": "2.6"}}
    assert alone["versions"] == {"torch": "2.5"}
    assert [row["case"] for row in mutations.kept(file, {"c": 1})] == ["2 formats"]
    assert [row["case"] for row in mutations.kept(file, {"a": 1, "b": 1})] == ["c"]


def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert mutations._progress(file, 7, None) == (7, 0, {})
    file.write_text(json.dumps({"seed": 7, "done": 500, "formats": None, "seen": {"a": {"read": 3}}}))
    assert mutations._progress(file, None, None) == (7, 500, {"a": Counter(read=3)})
    for seed, formats in ((8, None), (7, ["a"])):
        with pytest.raises(SystemExit, match="from another seed"):
            mutations._progress(file, seed, formats)

"""A mix on the page: its curve with the chosen point, and a bar for each block; a comparison with mixes."""

from __future__ import annotations

from pathlib import Path

import pytest

import sdquant
from sdquant.demo import path
from sdquant.evaluation import compare
from sdquant.planning import Plan, mix_blocks
from sdquant.settings import Settings, settings_file
from sdquant.ui import mix_view, quality_curve
from sdquant.ui.model_folders import Roots
from sdquant.ui.plan_preview import Target, review
from sdquant.ui.preloading import warm_up
from sdquant.ui.tabs import compare_curve

FLUX = path("digits-flux")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "mix-view"))


def test_a_plan_before_and_after_the_weights_are_read() -> None:
    """The page reads no weights to show a plan; once they were read, it shows what they said."""
    values = Settings({"size": "4MB"}).values
    seen = review(Target(path=str(FLUX)), values)
    assert seen.error is None and seen.plan is not None and seen.plan.curve is not None
    html = mix_view.mix_html(seen.plan)
    assert "a guess" in html and "Applying reads the weights once" in html and "sq-picked" in html
    plan = sdquant.plan(FLUX, "auto", size="4MB", progress=False)
    after = review(Target(path=str(FLUX)), values).plan
    assert after is not None and after.curve == plan.curve
    html = mix_view.mix_html(after)
    assert "Applying reads" not in html and html.count('class="sq-bar"') == len(mix_blocks.blocks_of(plan))
    assert "transformer_blocks.0" in html and mix_view.mix_html(sdquant.plan(FLUX, "nf4", progress=False)) == ""


def test_a_comparison_with_mixes(tmp_path: Path) -> None:
    """`auto` takes the size of the settings, `auto,size=` its own; the others none. The curve comes with them."""
    made = compare.compare(FLUX, ["auto", "auto,size=5MB", "int8"], prompt="a handwritten three", steps=1, size="4MB")
    labels = [row.label for row in made.rows]
    assert labels == ["as found", "auto,size=4MB", "auto,size=5MB", "int8"] and not any(row.error for row in made.rows)
    sizes = [row.bytes or 0 for row in made.rows]
    assert sizes[1] <= 4_000_000 < sizes[2] <= 5_000_000
    assert made.curve is not None and made.curve.pick is not None and made.curve.pick.bytes == sizes[1]
    assert made.to_dict()["curve"]["mixes"] and "curve" not in made.rows[1].to_dict()
    svg = quality_curve.curve(made.rows)
    assert svg.count("sq-picked") == 2 and "auto,size=5MB" in svg
    assert "chosen mix" in compare_curve.curve_html(made.curve) and compare_curve.curve_html(None) == ""


def test_a_curve_without_a_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read: list[tuple[int, int]] = []
    found = compare.predict_curve(
        FLUX, on_weights=lambda done, of: read.append((done, of)), components=("transformer",)
    )
    assert found.pick is None and found.how == "weights" and "chosen mix" not in quality_curve.predicted(found)
    assert read[-1][0] == read[-1][1] > 20


def test_the_start_of_the_page_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seen: list[Plan] = []
    monkeypatch.setattr("sdquant.loading.import_classes", seen.append)
    settings_file.save(tmp_path / "settings.json", Settings({"size": "4MB"}))
    warm_up(Roots(), tmp_path / "settings.json")
    assert [plan.curve.how for plan in seen if plan.curve] == ["names"]
    assert not (tmp_path / "cache").exists()

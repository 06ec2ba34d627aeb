"""What the settings tab knows of a choice: all of it from the matrix and the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sdquant
from sdquant import backends, demo
from sdquant.compat import hardware, matrix
from sdquant.planning.preparation import prepare
from sdquant.planning.settings_fields import fields
from sdquant.settings import Settings
from sdquant.ui import widgets
from sdquant.ui.plan_preview import Target, review

SD = Target(path=str(demo.path("digits-sd")))


def near(**chosen: Any) -> dict[str, Any]:
    return {**Settings().values, **{name.replace("__", "."): value for name, value in chosen.items()}}


def test_marks_are_what_the_matrix_says() -> None:
    here = hardware.probe()
    cells = {
        (cell.scheme, cell.offload): cell.verdict
        for cell in matrix(here.best.kind, machine=here)
        if cell.mode == "pre" and cell.runtime == "default"
    }
    for offload in ("none", "balanced", "sequential"):
        marks = review(SD, near(offload=offload)).marks["quant.model"]
        schemes = [row.name for row in backends.schemes() if row.on_the_fly]
        assert {name: marks[name].verdict for name in schemes} == {name: cells[name, offload] for name in schemes}


def test_the_plan_is_the_planners() -> None:
    values = near(quant__model="nf4", quant__text_encoder="int8")
    seen = review(SD, values)
    assert seen.error is None and seen.plan == prepare(SD.request(Settings(values)))
    assert {part.name: part.scheme for part in seen.plan.components} == {
        "unet": "nf4", "text_encoder": "int8", "vae": None,
    }  # fmt: skip


def test_a_refusal_has_its_sentence_and_ways_out() -> None:
    seen = review(SD, near(quant__model="qint8", offload="balanced"))
    assert seen.plan is None and isinstance(seen.error, sdquant.IncompatibleError)
    assert "QBytesTensor.new()" in seen.error.why
    assert seen.marks["quant.model"]["qint8"].verdict == seen.marks["offload"]["balanced"].verdict == "breaks"
    assert seen.marks["offload"]["model"].verdict == seen.marks["runtime"]["plain"].verdict == "works"
    for fix in seen.fixes:
        assert review(SD, {**near(quant__model="qint8", offload="balanced"), **fix.changes}).error is None


def test_what_is_quantized_on_disk_counts(tmp_path: Path) -> None:
    sdquant.save(sdquant.load_model(demo.path("digits-sd"), "qint8", progress=False), tmp_path / "saved")
    held = Target(path=str(tmp_path / "saved"))
    marks = review(held, near()).marks
    assert marks["offload"]["balanced"].verdict == "breaks"  # of the file's qint8, though nothing was chosen
    assert isinstance(review(held, near(quant__model="nf4")).error, sdquant.ConflictError)


def test_a_lone_component_with_a_base() -> None:
    lone = Target(path=str(demo.path("digits-sd") / "unet"), base=str(demo.path("digits-sd")))
    assert set(lone.components(Settings())) == {"unet", "text_encoder", "vae"}
    seen = review(lone, near(quant__model="nf4"))
    assert seen.plan is not None
    assert [part.name for part in seen.plan.components if part.scheme == "nf4"] == ["unet"]


@pytest.mark.parametrize("name", ["nowhere", "unet/config.json"])
def test_what_cannot_be_loaded(name: str) -> None:
    assert review(Target(path=str(demo.path("digits-sd") / name)), near()).error is not None


def test_choices_are_marked_only_where_another_choice_of_the_field_would_help() -> None:
    seen = review(SD, near(quant__model="qint8", offload="balanced"))
    shown = {row.name: dict(map(reversed, widgets.choices(row, seen.marks.get(row.name, {})))) for row in fields()}
    assert "✕" in shown["quant.model"]["qint8"] and "✕" not in shown["quant.model"]["nf4"]
    assert "✕" in shown["offload"]["balanced"] and "✕" not in shown["offload"]["model"]
    assert all("✕" not in label for label in shown["mode"].values())  # no mode is what is wrong

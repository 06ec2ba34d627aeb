"""glyphs-flux, which is measured on: its prompts, its judge, its tables; the model itself where it is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sdquant
from bench import _pictures, better_codes, fidelity
from sdquant.models.generate import draw, native_size
from tools import better_codes as tables
from tools.glyphs_model import FOLDER, glyphs

MODEL = "glyphs-flux"


def test_prompts_name_every_attribute() -> None:
    assert len({one.prompt for one in glyphs.shapes()}) == len(glyphs.CHARACTERS) * len(glyphs.FONTS)
    one = glyphs.Glyph(character="K", bold=True, serif=True, colour="red", ground="blue")
    assert one.prompt == "red bold serif K on blue"
    assert glyphs.samples(5, 1) == glyphs.samples(5, 1) != glyphs.samples(5, 2)


def test_the_judge_reads_what_is_drawn() -> None:
    judge = glyphs.GlyphJudge(each=8, held_back=204)
    assert judge.accuracy >= 0.98
    assert judge.read([]) == []


def test_each_model_is_asked_for_what_it_draws() -> None:
    assert [_pictures.prompt(thing) for thing in _pictures.wanted("digits-sd", 2)] == [
        "a handwritten zero", "a handwritten one",
    ]  # fmt: skip
    assert _pictures.prompt(_pictures.wanted(MODEL, 1, 3)[0]) == glyphs.samples(1, 3)[0].prompt
    assert set(better_codes.MODELS) == set(_pictures.MODELS) == set(tables.MODELS)


def test_a_goal_counts_what_is_calibrated_and_whose_it_is(tmp_path: Path) -> None:
    file = tmp_path / tables.FILE
    assert tables.goals(tmp_path) == tables.UNMEASURED
    file.parent.mkdir(parents=True)
    rows = [
        {"name": name, "case": "digits-sd", "bits": bits, "snr": snr}
        for name, bits, snr in (
            ("q4_k", 4.5, 20.0), ("q4_k,imatrix", 4.5, 23.5), ("q4_1", 5.0, 40.0), ("auto, 0.28", 4.48, 21.0),
            ("auto, 0.28, statistics", 4.48, 25.0), ("q3_k", 3.44, 14.0), ("auto, 0.2, statistics", 3.2, 19.0),
        )
    ]  # fmt: skip
    file.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    lines = tables.goals(tmp_path).splitlines()[2:]
    assert [line.split("|")[4].split("(")[0].strip() for line in lines] == [
        "+5.0 dB, met", "+1.5 dB, missed", "+5.0 dB, met", "+1.0 dB, missed",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.exists(), reason="glyphs-flux is not trained here: python -m tools.glyphs_model.train")
class TestTrained:
    """The model, in the folder that its training leaves."""

    def test_draws_what_is_asked_for(self) -> None:
        pipe = sdquant.load_model(FOLDER, progress=False)
        assert native_size(pipe) == glyphs.SIZE
        things = glyphs.samples(20)
        pictures = draw(pipe, [one.prompt for one in things], seeds=range(20), steps=8)
        assert _pictures.right(MODEL, things, pictures) >= 14

    def test_is_what_is_recorded(self) -> None:
        rows = json.loads(fidelity.GLYPHS.read_text(encoding="utf-8"))["rows"]
        assert {row["digest"] for row in rows} == {fidelity.digest(MODEL)}

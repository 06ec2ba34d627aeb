"""Pieces of the page: what they say, and that nothing from outside becomes HTML."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import sdquant
import sdquant.settings
from sdquant import demo
from sdquant.compat import hardware
from sdquant.evaluation import ComparisonRow
from sdquant.ui import html_components, quality_curve
from sdquant.ui.model_folders import Roots
from sdquant.ui.model_manager import Drawing, Engine, Progress
from sdquant.ui.plan_preview import Target, review
from sdquant.ui.support_view import shown

HOSTILE = """<script>alert("1")</script><img src=x onerror='alert(2)'>"""


class Tags(HTMLParser):
    """The tags, the attributes' names and the text of a piece of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    "html",
    [
        html_components.refusal(sdquant.SdquantError(HOSTILE, HOSTILE, HOSTILE), Roots()),
        html_components.refusal(ValueError(HOSTILE), Roots()),
        html_components.paragraph(HOSTILE),
        html_components.note(HOSTILE),
        html_components.html_table((HOSTILE,), [(HOSTILE,)]),
        html_components.facts([(HOSTILE, HOSTILE)]),
        html_components.bar(HOSTILE, HOSTILE, 1, 2, 3),
        html_components.chip(HOSTILE, HOSTILE),
        html_components.progress(Progress(stage=HOSTILE, done=1, total=2)),
    ],
    ids=range(9),
)
def test_texts_stay_texts(html: str) -> None:
    seen = Tags(html)
    assert "script" not in seen.tags and "img" not in seen.tags
    assert not any(name.startswith("on") for name in seen.attributes)
    assert "alert(" in seen.text


def test_a_refusal_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    inside, outside = tmp_path / "models", tmp_path / "elsewhere"
    inside.mkdir()
    error = sdquant.BadFileError(f"{inside}/a.safetensors was read", f"{outside}/b is damaged", f"Look at {outside}/c")
    html = html_components.refusal(error, Roots([inside]))
    assert str(tmp_path) not in html
    assert "models/a.safetensors" in html and "b is damaged" in html


@pytest.mark.parametrize(("done", "total", "words"), [(0, 0, "Loading"), (1, 4, "25%"), (9, 4, "100%")])
def test_progress(done: int, total: int, words: str) -> None:
    assert words in Tags(html_components.progress(Progress(stage="loading", done=done, total=total))).text


def test_the_plan_as_bars() -> None:
    seen = review(Target(path=str(demo.path("digits-sd"))), {**_defaults(), "quant.model": "int8"})
    assert seen.plan is not None
    html = shown(seen, {**_defaults(), "quant.model": "int8"}, Roots())
    for part in seen.plan.components:
        assert f'data-name="{part.name}" data-bytes="{part.bytes}"' in html
    assert "This works" in html and "Striped" in html


def test_what_does_not_fit_is_said() -> None:
    seen = review(Target(path=str(demo.path("digits-sd"))), _defaults())
    assert seen.plan is not None
    assert "sq-over" in html_components.plan_bars(seen.plan, seen.plan.bytes // 2)
    assert "sq-over" not in html_components.plan_bars(seen.plan, seen.plan.bytes * 2)


def test_what_is_too_large_works_only_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    here = hardware.probe()
    small = tuple(dataclasses.replace(one, memory_free=3_500_000) for one in here.devices)
    machine = dataclasses.replace(here, devices=small)
    monkeypatch.setattr(hardware, "probe", lambda: machine)
    target = Target(path=str(demo.path("digits-sd")))
    seen = review(target, _defaults())
    text = Tags(shown(seen, _defaults(), Roots())).text
    assert "Too large for the free RAM" in text and "This works" not in text and "Use balanced offload" in text
    (fix,) = seen.fixes
    values = {**_defaults(), **fix.changes}
    html = shown(review(target, values), values, Roots())
    assert "This works" in html and "in turns, in 3.5 MB" in html and "sq-over" not in html


def test_what_stands_beside_an_image() -> None:
    target = Target(path=str(demo.path("digits-sd")))
    settings = sdquant.settings.Settings(
        {"quant.model": "nf4", "offload": "balanced", "budget": "3MB", "runtime": "library"}
    )
    made = Engine().draw(target.request(settings), Drawing(prompt="a handwritten one", steps=2, seed=3))
    text = Tags(html_components.drawn(made, Roots(), 123_000_000)).text
    for words in ("digits-sd", "nf4, quantized while loading, library runtime", "balanced", "budget 3.0 MB", "seed 3",
                  "2 steps", "123.0 MB"):  # fmt: skip
        assert words in text


def _defaults() -> dict[str, object]:
    return dict(sdquant.settings.Settings().values)


def test_a_curve_joins_what_no_smaller_scheme_beats() -> None:
    rows = [
        ComparisonRow(quant=None, label="as found", bytes=100),
        ComparisonRow(quant="a", label="<b>a</b>", bytes=50, psnr=40.0),
        ComparisonRow(quant="b", label="b", bytes=60, psnr=30.0),
        ComparisonRow(quant="c", label="c", bytes=80, psnr=float("inf")),
    ]
    svg = quality_curve.curve(rows)
    assert svg.count("<circle") == 3 and "<b>" not in svg and "&lt;b&gt;a" in svg
    (line,) = re.findall(r'<polyline points="([^"]*)"', svg)
    assert len(line.split()) == 2  # not through b
    assert quality_curve.curve(rows[:2]) == ""

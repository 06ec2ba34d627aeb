"""Hostile requests to the real page, without a browser: what the guard must refuse, and events with values that no
widget would send."""

from __future__ import annotations

import html
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import sdquant

from ..ui.events import Answer, Events
from ..ui.hostile_requests import HOSTILE, JOIN, JSON, OWN, PARTS, Row, assert_refused, filled, leaks, part, site
from ..ui.wire import request

if TYPE_CHECKING:
    from ..ui.conftest import Served

pytestmark = pytest.mark.xdist_group("browser")

SCRIPT = "<script>alert(1)</script>"
NAMES = (
    "/etc/passwd", "{secret}", "../models-private/secret.safetensors", "models/../models-private/secret.safetensors",
    "models/link.safetensors", "models/out/secret.safetensors", "file:///etc/passwd", "http://127.0.0.1:1/x",
    "\\\\host\\share", "//host/share", "C:\\Windows\\win.ini", "NUL", "models/x\x00.gguf", "digits-sd/../digits-sd",
    "~", "$HOME", "x" * 100_000, SCRIPT,
)  # fmt: skip
ODD = (None, 5, True, 1e308, [], ["a"], [[]], {}, {"a": 1}, {"path": "a"})
# Events that take a name: the element, its event, the widget whose value it is, where the answer is shown.
NAMED = (
    ("draw", "click", "model", "status"),
    ("draw", "click", "base", "status"),
    ("draw", "click", "lora-0", "status"),
    ("apply", "click", "model", "applied"),
    ("model", "change", "model", "verdict-answer"),
    ("model", "change", "base", "verdict-answer"),
    ("file", "change", "file", "found"),
    ("verify", "click", "file", "checked"),
    ("verify", "click", "file-config", "checked"),
    ("compare-run", "click", "model", "compare-status"),
    ("preset", "change", "model", "preset-said"),
    ("again", "click", "model", ""),
    ("convert-run", "click", "model", "convert-status"),
    ("convert-run", "click", "convert-name", "convert-status"),
    ("convert-scheme", "change", "base", "convert-answer"),
    # The cache is a folder, too.
    ("apply", "click", "set-cache", "applied"),
    ("model", "change", "set-cache", "verdict-answer"),
    ("preset", "change", "set-cache", "preset-said"),
)

# Events, the widget that gets a value of another type; those for numbers can have some of them.
TYPED = (
    ("draw", "click", "model"),
    ("draw", "click", "steps"),
    ("draw", "click", "seed"),
    ("draw", "click", "lora-0"),
    ("model", "change", "model"),
    ("model", "change", "set-quant-model"),
    ("model", "change", "set-offload"),
    ("model", "change", "set-skip"),
    ("model", "change", "set-budget"),
    ("model", "change", "set-allow-pickle"),
    ("preset", "change", "preset"),
    ("file", "change", "file"),
    ("verify", "click", "file-config"),
    ("compare-run", "click", "compare-schemes"),
    ("compare-run", "click", "compare-seed"),
    ("again", "click", "base"),
    ("convert-run", "click", "convert-kind"),
    ("convert-run", "click", "convert-scheme"),
    ("convert-scheme", "change", "convert-scheme"),
)
SHOWN = {"draw": "status", "compare-run": "compare-status", "convert-run": "convert-status"}
USUAL = {"lora-0": (None,), **dict.fromkeys(("steps", "seed", "compare-seed"), (5, True))}


@pytest.fixture(scope="module")
def events(running: Served) -> Events:
    """The page's events."""
    return Events(running.port)


def _check(answer: Answer, server: Served, sent: object = None) -> None:
    """Nothing of the machine is in an answer, but for what was sent; and nothing that was sent is code in it."""
    raw = answer.raw.decode()
    for text in (json.dumps(sent)[1:-1], json.dumps(html.escape(str(sent)))[1:-1]):
        raw = raw.replace(text, "") if text else raw
    assert leaks(raw.encode(), server) == []
    for place in (Path(sdquant.__file__).parent, Path.home(), Path(sys.prefix), server.models.parent):
        assert str(place) not in raw
    assert not [one for one in answer.values.values() if "<script" in str(one)]


def _refused(answer: Answer, shown: str) -> bool:
    """Whether Gradio refused a value, or the page said why it does not do that."""
    return not answer.success or (bool(shown) and "sq-breaks" in str(answer.values[shown]))


@pytest.mark.parametrize("row", HOSTILE, ids=[row[0] for row in HOSTILE])
def test_hostile_requests_are_refused(running: Served, row: Row) -> None:
    assert_refused(running, row)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:30])
@pytest.mark.parametrize(("element", "event", "widget", "shown"), NAMED)
def test_names_open_nothing_outside(
    running: Served, events: Events, element: str, event: str, widget: str, shown: str, name: str
) -> None:
    sent = filled(name, running)
    number = events.number(element, event, widget, *filter(None, [shown]))
    answer = events.send(number, events.values(number, {widget: sent}))
    assert answer.status == 200
    assert _refused(answer, shown)
    _check(answer, running, sent)


@pytest.mark.parametrize(
    ("element", "event", "widget", "value"),
    [(*row, value) for row in TYPED for value in ODD if value not in USUAL.get(row[2], ())],
)
def test_values_of_other_types_do_no_harm(
    running: Served, events: Events, element: str, event: str, widget: str, value: Any
) -> None:
    number = events.number(element, event, widget)
    answer = events.send(number, events.values(number, {widget: value}))
    assert answer.status == 200
    if element in SHOWN:
        assert _refused(answer, SHOWN[element])
    _check(answer, running)


@pytest.mark.parametrize(
    "value", [-1, 0, 201, 10**400, 2.5, "1e9", float("nan"), float("inf"), -float("inf")], ids=repr
)
@pytest.mark.parametrize("widget", ["steps", "compare-steps"])
def test_numbers_outside_the_limits_are_refused(running: Served, events: Events, widget: str, value: object) -> None:
    element, shown = ("draw", "status") if widget == "steps" else ("compare-run", "compare-status")
    number = events.number(element)
    answer = events.send(number, events.values(number, {widget: value}))
    assert _refused(answer, shown) if answer.status == 200 else answer.status in (400, 422)
    _check(answer, running)


@pytest.mark.parametrize("data", [None, "x", {}, [], [1], {"0": "x"}, 5], ids=repr)
def test_wrong_numbers_of_values_are_refused(running: Served, events: Events, data: object) -> None:
    for row in events.config["dependencies"]:
        if len(row["inputs"]) > 1:
            answer = events.send(row["id"], data)
            assert not answer.success
            _check(answer, running)


def test_more_values_than_widgets_are_left_out(running: Served, events: Events) -> None:
    number = events.number("file", "change")
    answer = events.send(number, [*events.values(number, {"file": "digits-sd"}), "/etc/passwd", SCRIPT])
    _check(answer, running)
    assert not answer.success or "digits-sd" in answer.values["found"]


@pytest.mark.parametrize("number", [-1, 9999, 10**30, "0", "draw", None, 1.5, [0], {"a": 1}, SCRIPT], ids=repr)
def test_events_that_are_none_are_refused(running: Served, events: Events, number: object) -> None:
    answer = events.send(number, [])
    assert not answer.success
    _check(answer, running)


@pytest.mark.parametrize(
    "more",
    [
        {"trigger_id": 9999},
        {"trigger_id": SCRIPT},
        {"event_data": {"target": "/etc/passwd", "_data": [SCRIPT]}},
        {"event_id": "../../x"},
        {"api_name": "/../../etc/passwd"},
        {"batched": True},
        {"request": {"username": "root"}},
        {"simple_format": True},
    ],
    ids=str,
)
def test_what_else_an_event_may_carry_changes_nothing(running: Served, events: Events, more: dict[str, Any]) -> None:
    number = events.number("model", "change", "verdict-answer")
    _check(events.send(number, events.values(number), **more), running)


@pytest.mark.parametrize("element", ["cancel", "cancel-load", "compare-cancel", "convert-cancel", "verify-cancel"])
def test_buttons_that_cannot_be_pressed_do_nothing(running: Served, events: Events, element: str) -> None:
    number = events.number(element)
    answer = events.send(number, events.values(number))
    changed = [value for value in answer.values.values() if value not in (None, {"__type__": "update"})]
    assert changed == []
    _check(answer, running)


def test_a_prompt_that_is_code_is_a_text(running: Served, events: Events) -> None:
    answer = events.fire("draw", prompt=SCRIPT, steps=1)
    assert "sq-ok" in answer.values["status"]
    assert not [one for one in answer.values.values() if "<script" in str(one)]


def test_code_in_every_text_of_the_settings_is_a_text(running: Served, events: Events) -> None:
    number = events.number("apply")
    texts = [row["props"]["elem_id"] for row in events.config["components"] if _is_text(row)]
    assert len(texts) > 5
    for name in texts:
        answer = events.send(number, events.values(number, {name: SCRIPT}))
        assert _refused(answer, "applied"), name
        _check(answer, running)


def _is_text(row: dict[str, Any]) -> bool:
    return (
        row["type"] in ("textbox", "dropdown")
        and str(row["props"].get("elem_id")).startswith("set-")
        and (
            row["props"].get("elem_id") != "set-skip"  # any text is the name of a module
        )
    )


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"",
        b"[" * 50_000,
        b'{"format": "sdquant-settings", "version": 1, "settings": {"<script>": 1}}',
        b'{"format": "sdquant-settings", "version": 1, "settings": {"quant.model": "<script>"}}',
        b'{"bnb_quantization": ["<script>"], "bnb_quantization_type": "<script>"}',
        b'{"format": "sdquant-settings", "version": "<script>"}',
        b"<script>",
        b" " * (2 << 20),
    ],
    ids=lambda content: content[:70],
)
def test_imported_files_are_checked(running: Served, events: Events, content: bytes) -> None:
    body = part("settings.json").replace(b"evil", content)
    sent = request(running.port, "POST", "/gradio_api/upload", (PARTS, OWN), body)
    assert sent.status == 200
    file = {"path": json.loads(sent.body)[0], "orig_name": "settings.json", "meta": {"_type": "gradio.FileData"}}
    number = events.number("import", "upload")
    values = events.values(number)
    values[0] = file
    answer = events.send(number, values)
    assert not answer.success or "sq-breaks" in answer.values["applied"] or "Not taken" in answer.values["applied"]
    assert not [one for one in answer.values.values() if "<script" in str(one)]
    assert leaks(answer.raw, running) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<script>alert(1)</script>\nSteps: 7, Sampler: <script>, Seed: 5", {"steps": 7, "seed": 5}),
        ("p\nSteps: 99999999999999999999999, Seed: -1, CFG scale: nan, Size: 1e9x-3", {"prompt": "p"}),
        ("p\nSteps: 3, Seed: 1, Sampler: UniPC", {"steps": 3, "sampler": "the model's own"}),  # not of digits-flux
        ("x" * 30_000, {}),
        ("a " * 10_000, {}),
    ],
    ids=lambda text: str(text)[:20],
)
def test_dropped_pictures_are_checked(
    running: Served, events: Events, tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    info = PngInfo()
    info.add_text("parameters", text)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=info)
    body = part("picture.png").replace(b"evil", (tmp_path / "a.png").read_bytes())
    sent = request(running.port, "POST", "/gradio_api/upload", (PARTS, OWN), body)
    file = {"path": json.loads(sent.body)[0], "orig_name": "picture.png", "meta": {"_type": "gradio.FileData"}}
    number = events.number("dropped", "upload")
    answer = events.send(number, events.values(number, {"dropped": file, "model": "digits-flux"}))
    assert "Settings taken" in answer.values["status"] and "<script" not in answer.values["status"]
    skipped = {"__type__": "update"}
    values = {name: answer.values[name] for name in ("steps", "seed", "width", "height", "guidance", "sampler")}
    assert {name: answer.values[name] for name in expected} == expected
    assert all(one == skipped for name, one in values.items() if name in ("width", "height"))
    assert values["sampler"] == "the model's own"
    assert leaks(answer.raw, running) == []


def _bomb() -> bytes:
    kept = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(kept, "PNG")  # 400 million pixels in 50 kB
    return kept.getvalue()


@pytest.mark.parametrize("content", [b"no image", b"\x89PNG\r\n\x1a\n", _bomb()], ids=["text", "cut", "bomb"])
@pytest.mark.parametrize("place", ["background", "layers"])
def test_start_images_are_checked(running: Served, events: Events, content: bytes, place: str) -> None:
    body = part("picture.png").replace(b"evil", content)
    sent = request(running.port, "POST", "/gradio_api/upload", (PARTS, OWN), body)
    file = {"path": json.loads(sent.body)[0], "orig_name": "picture.png", "meta": {"_type": "gradio.FileData"}}
    value = {"background": None, "layers": [], "composite": None, place: file if place == "background" else [file]}
    answer = events.fire("draw", model="digits-sd", steps=1, start=value)
    assert not answer.success
    assert leaks(answer.raw, running) == []
    number = events.number("start-file", "upload")
    told = events.send(number, events.values(number, {"start-file": file}))
    assert "sq-breaks" in told.values["start-said"] and "Cannot start from picture.png" in told.values["start-said"]
    assert leaks(told.raw, running) == []
    outside = events.fire("draw", start={"background": {**file, "path": "/etc/passwd"}, "layers": []})
    assert outside.status == 403


def test_the_page_goes_on_and_nothing_was_kept(running: Served, events: Events) -> None:
    page = request(running.port, "GET", "/", site("none", "navigate", "document"))
    assert page.status == 200
    assert running.process.poll() is None
    number = events.number("model", "change", "verdict-answer")
    answer = events.send(number, events.values(number))
    assert "sq-works" in answer.values["verdict-answer"]
    assert not list(running.outside.parent.rglob("*.part"))
    assert request(running.port, "POST", JOIN, (JSON, OWN), b"{").status == 400

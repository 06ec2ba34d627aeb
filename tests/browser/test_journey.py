"""A person's way through the page, from the first image to settings that are still there after a restart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Browser, Page, expect

from sdquant import demo
from sdquant.planning.settings_fields import fields

from .conftest import run
from .person import Person, digit

if TYPE_CHECKING:
    from ..ui.conftest import Served

pytestmark = pytest.mark.xdist_group("browser")
DIGIT = re.compile("A seven .* by a small model")

# What a button shows, and whether it is disabled, at every change of it.
WATCH = """button => {
    window.shown = [];
    const look = () => shown.push([button.innerText.trim(), button.disabled]);
    new MutationObserver(look).observe(button, {
        attributes: true, characterData: true, childList: true, subtree: true,
    });
}"""


def test_from_the_first_image_to_a_restart(page: Page, serve: object, tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    served = run(serve, settings)
    person = Person(page, served.url)
    person.model("digits-sd")
    assert digit(person.draw("a handwritten seven")) == 7
    whole, on_device = person.weights()
    assert whole <= on_device  # with buffers that no file holds

    person.tab("Settings")
    person.set("quant.model", "nf4")
    person.set("offload", "balanced")
    person.write("set-budget", "2MB")
    expect(page.locator("#verdict .sq-works")).to_be_visible()
    expect(page.locator("#verdict [data-name=unet]")).to_contain_text("nf4")
    expect(person.apply()).to_contain_text("Applied")
    assert digit(person.draw("a handwritten seven")) == 7
    less, peak = person.weights()
    assert less < whole and peak <= 2_000_000 < on_device

    person.tab("Settings")
    person.set("quant.model", "qint8")
    refused = page.locator("#verdict .sq-breaks")
    expect(refused).to_contain_text(re.compile("alanced offload moves single layers"))
    fixes = page.locator("button[id^=fix-]:visible").all_inner_texts()
    expect(refused).to_contain_text(f"What to do: {fixes[0]}")  # what a fix says is what its button does
    assert len(fixes) > 1 and all(text[1:] in refused.inner_text() for text in fixes)
    assert not re.search(r"""=["'\w]|\(\)|`""", refused.inner_text())  # no Python
    expect(page.get_by_role("button", name="Apply and load")).to_be_disabled()
    expect(page.locator("#in-memory")).to_contain_text("nf4")
    page.locator("#fix-0").click()
    expect(page.locator("#verdict .sq-works")).to_be_visible()
    assert person.value("offload") == "model"
    expect(person.apply()).to_contain_text("Applied")
    expect(page.locator("#in-memory")).to_contain_text("qint8, model offload")
    assert digit(person.draw("a handwritten seven")) == 7

    assert json.loads(settings.read_text())["settings"] == {"quant.model": "qint8", "offload": "model"}
    assert served.end() is not None
    away = page.locator("#server-away[role=alert]")
    expect(away).to_contain_text("The server does not answer")
    again = Person(page, run(serve, settings, "--port", str(served.port)).url, goto=False)
    expect(away).to_contain_text("The server is there again")
    away.get_by_role("button", name="Reload the page").click()
    expect(away).to_have_count(0)
    expect(page.locator("#in-memory")).to_contain_text("No model is loaded")
    again.tab("Settings")
    expect(page.locator("#set-offload input")).to_have_value("model")
    assert (again.value("quant.model"), again.value("offload")) == ("qint8", "model")


def test_presets_and_files_fill_the_settings(person: Person, tmp_path: Path) -> None:
    """One way through all of it: opening a page takes longer than the rest."""
    person.tab("Settings")
    person.page.get_by_role("button", name="Fits 6 GB").click()
    expect(person.page.locator("#preset-said .sq-info")).to_contain_text("Fits 6 GB")
    expect(person.page.locator("#verdict .sq-works")).to_be_visible()

    # Every field has a widget with its help.
    person.page.locator("#more").get_by_role("button").first.click()
    for row in fields():
        box = person.page.locator(f"#set-{row.name.replace('.', '-').replace('_', '-')}")
        expect(box).to_be_visible()
        expect(box).to_contain_text(row.help)

    # Settings go out and come back.
    with person.page.expect_download() as waiting:
        person.page.locator("#export").click()
    waiting.value.save_as(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["format"] == "sdquant-settings"

    (tmp_path / "config.json").write_text(
        json.dumps(
            {"bnb_quantization": ["Model"], "bnb_quantization_type": "nf4", "diffusers_offload_mode": "balanced"}
        )
    )
    person.upload("import", tmp_path / "config.json")
    expect(person.page.locator("#applied .sq-info")).to_contain_text("Imported")
    expect(person.page.locator("#verdict [data-name=transformer]")).to_contain_text("nf4")
    assert (person.value("quant.model"), person.value("offload")) == ("nf4", "balanced")

    (tmp_path / "bad.json").write_text('{"format": "sdquant-settings", "version": 99}')
    person.upload("import", tmp_path / "bad.json")
    expect(person.page.locator("#applied .sq-breaks")).to_be_visible()
    assert person.value("quant.model") == "nf4"


def test_cancel_a_drawing(person: Person) -> None:
    """Of minutes: on a busy machine one of 30 s had ended before the page was there again, and Cancel was off."""
    person.draw("a handwritten three", steps=1)  # loads
    page = person.page
    page.locator("#steps input[type=number]").fill("200")
    person.size(512)
    page.get_by_role("button", name="Generate", exact=True).click()
    drawing = page.locator("#status [role=progressbar]")
    expect(drawing).to_contain_text(re.compile("step [1-9]"))
    page.reload()  # which ends nothing, and shows what is under way
    expect(drawing).to_contain_text(re.compile("step [1-9]"))
    expect(page.locator("#draw")).to_be_disabled()
    page.locator("#cancel").click()
    expect(page.locator("#status .sq-info")).to_contain_text("Cancelled")
    expect(page.locator("#draw")).to_be_enabled()
    assert digit(person.draw("a handwritten three")) == 3


def test_the_page_answers_while_it_draws(person: Person) -> None:
    page = person.page
    person.model("digits-flux")
    person.draw("a handwritten six", steps=1)  # loads
    page.locator("#steps input[type=number]").fill("200")
    person.size(512)
    page.get_by_role("button", name="Generate", exact=True).click()
    drawing = page.locator("#status [role=progressbar]")
    expect(drawing).to_contain_text(re.compile("step [1-9]"))
    person.tab("Settings")
    person.set("quant.model", "int8")
    expect(page.locator("#verdict [data-name=transformer]")).to_contain_text("int8")
    person.tab("Inspect")
    person.pick("file", "digits-sd")
    expect(page.locator("#found .sq-card").first).to_contain_text("digits-sd")
    person.tab("Generate")
    expect(drawing).to_be_visible()  # all that was before its end
    page.locator("#cancel").click()
    expect(page.locator("#status .sq-info")).to_contain_text("Cancelled")


def test_inspect_broken_and_hostile_files(person: Person, running: Served) -> None:
    source = next((demo.path("digits-sd") / "unet").glob("*.safetensors")).read_bytes()
    (running.models / "cut.safetensors").write_bytes(source[: len(source) // 2])
    person = Person(person.page, running.url)  # opened anew, the page lists new files
    person.tab("Inspect")
    person.pick("file", "models/cut.safetensors")
    found = person.page.locator("#found .sq-breaks")
    expect(found).to_contain_text("cut.safetensors")
    assert str(running.models) not in person.page.content()
    (running.models / "<img src=x onerror=alert(1)>.safetensors").write_bytes(source)
    person.page.locator("#files-again").click()
    person.pick("file", "models/<img src=x onerror=alert(1)>.safetensors")
    expect(person.page.locator("#found .sq-card").first).to_contain_text("<img src=x")
    assert person.page.locator("#found img").count() == 0
    person.pick("file", "digits-sd/unet")
    expect(person.page.locator("#found")).to_contain_text("What it goes with")
    person.page.locator("#verify").click()
    expect(person.page.locator("#checked .sq-ok")).to_contain_text("digits-sd/unet: every tensor was read")


def test_compare(person: Person, tmp_path: Path) -> None:
    page = person.page
    person.model("digits-sd")
    person.draw("a handwritten three", steps=1)
    before = page.locator("#in-memory").inner_text()
    person.tab("Compare")
    page.locator("#compare-schemes").get_by_role("button", name=re.compile("Clear|Remove all")).last.click()
    page.locator("#compare-schemes input").fill("int8")
    page.get_by_role("option", name="int8", exact=True).click()
    page.keyboard.press("Escape")
    page.locator("#compare-steps input[type=number]").fill("4")
    predict = page.locator("#compare-predict")
    predict.evaluate(WATCH)
    page.locator("#compare-run").click()
    rows = page.locator("#compare-rows tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(1)).to_contain_text(re.compile(r"int8.*(dB|identical)"))
    expect(page.locator("#compare-sheet img")).to_be_visible()
    expect(page.locator("#compare-rows svg.sq-curve circle")).to_have_count(0)  # of one scheme there is no curve
    expect(page.locator("#compare-slider img")).to_have_count(2)
    handle = page.locator("#compare-slider [role=slider]")
    before_keys = handle.get_attribute("style") or ""
    handle.press("ArrowRight")
    expect(handle).not_to_have_attribute("style", before_keys)
    expect(handle).to_have_attribute("aria-valuenow", "55")
    expect(predict).to_be_enabled()
    expect(predict).to_have_text("Predict the curve")
    # It would have ended the comparison, which may be over before one looks.
    assert ["Predict the curve, when this is done", True] in page.evaluate("shown")
    person.pick("compare-right", "as found")
    expect(page.locator("#in-memory")).to_contain_text(before)  # what was loaded is loaded still
    with page.expect_download() as waiting:
        page.locator("#compare-json").click()
    waiting.value.save_as(tmp_path / "out.json")
    made = json.loads((tmp_path / "out.json").read_text())
    assert [row["label"] for row in made["rows"]] == ["as found", "int8"] and made["model"] == "digits-sd"

    person.tab("Settings")  # the table shows what was compared, and a digit where nothing was
    thumb = page.locator("[data-group='8-bit'] tr[data-scheme=int8] .sq-thumb")
    expect(thumb).to_have_attribute("title", re.compile("“a handwritten seven” as int8 draws it: .* dB"))
    assert thumb.evaluate("it => getComputedStyle(it).backgroundImage").startswith('url("data:image/jpeg')
    expect(page.locator("[data-group='4-bit'] [data-scheme=nf4] .sq-thumb")).to_have_attribute("title", DIGIT)
    expect(page.locator("#schemes")).to_contain_text("from your last comparison")
    person.model("digits-flux")  # of which nothing was compared
    expect(thumb).to_have_attribute("title", DIGIT)


def test_two_tabs_at_once(person: Person, chromium: Browser, running: Served) -> None:
    with chromium.new_context() as context:
        other = Person(context.new_page(), running.url)
        person.model("digits-sd")
        other.model("digits-flux")
        for somebody, prompt in ((person, "a handwritten one"), (other, "a handwritten four")):
            somebody.write("prompt", prompt)
            somebody.page.locator("#steps input[type=number]").fill("12")
        for somebody in (person, other):
            somebody.page.get_by_role("button", name="Generate", exact=True).click()
        for somebody in (other, person):
            somebody.done()
        assert (digit(person.image()), digit(other.image())) == (1, 4)
        expect(person.page.locator("#facts")).to_contain_text("digits-sd")
        expect(other.page.locator("#facts")).to_contain_text("digits-flux")
        other.draw("a handwritten four", steps=1)
        person.page.evaluate("window.dispatchEvent(new Event('focus'))")  # whoever comes back sees what is loaded now
        expect(person.page.locator("#in-memory")).to_contain_text("digits-flux")


def test_settings_applied_in_one_tab_are_there_in_the_next(person: Person, chromium: Browser, running: Served) -> None:
    person.model("digits-sd")
    person.tab("Settings")
    person.set("quant.text_encoder", "int8")
    expect(person.page.locator("#verdict [data-name=text_encoder]")).to_contain_text("int8")
    expect(person.apply()).to_contain_text("Applied")
    with chromium.new_context() as context:
        other = Person(context.new_page(), running.url)
        other.tab("Settings")
        expect(other.page.locator("#set-quant-text-encoder input")).to_have_value("int8")
        expect(other.page.locator("#in-memory")).to_contain_text("int8")

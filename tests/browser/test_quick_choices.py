"""People who type, and who are faster than the server: each choice counts, and a name is the one that was meant."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

from .person import Person
from .test_scheme_table import SLOW

if TYPE_CHECKING:
    from ..ui.conftest import Served

pytestmark = pytest.mark.xdist_group("browser")

# The last letter and Enter, with nothing between them, as a busy browser takes them.
LAST_LETTER_AND_ENTER = """box => {
    box.value = "nf4";
    box.dispatchEvent(new InputEvent("input", { bubbles: true }));
    box.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
}"""


def test_typing_in_boxes_with_a_list(person: Person) -> None:
    page, keys = person.page, person.page.keyboard
    options = page.get_by_role("option")
    person.tab("Settings")
    expect(page.locator("#schemes table")).to_be_visible()
    box = page.locator("#set-quant-model input")
    for typed, chosen in (("int8", "int8"), ("FP4", "fp4"), ("sdnq-uint4", "sdnq-uint4"), ("nf4,", "nf4,")):
        box.click()  # which selects what is there, so that typing takes its place
        keys.type(typed)
        expect(box).to_have_value(typed)
        if typed != "nf4,":
            expect(options.first).to_have_attribute("aria-label", re.compile(f"^{chosen}"))
        keys.press("Enter")
        expect(box).to_have_value(re.compile(rf"^{chosen}($|\s)"))

    box.click()
    box.evaluate(LAST_LETTER_AND_ENTER)
    page.wait_for_timeout(300)
    expect(page.get_by_role("listbox")).to_have_count(0)
    box.click()
    keys.type("nf5")  # of which there is none
    expect(box).to_have_value("nf5")
    keys.press("Tab")
    page.get_by_role("button", name="Use nf4 instead of nf5").click()
    expect(box).to_have_value("nf4")
    expect(page.locator("#verdict .sq-works")).to_be_visible()

    person.tab("Compare")
    box, words = page.locator("#compare-schemes input"), page.locator("#compare-schemes .token")
    start = words.all_inner_texts()
    box.click()
    keys.type("sdnq-u")
    keys.press("Enter")  # half of a name: the first that has it
    expect(words).to_have_text([*start, "sdnq-uint4"])
    keys.type("int8")
    keys.press("Enter")  # which is there already
    keys.type("hub")
    keys.press("Tab")  # half of a name that is left behind
    expect(box).to_have_value("")
    box.click()
    keys.type("auto,size=1MB")
    keys.press("Tab")
    expect(words).to_have_text([*start, "sdnq-uint4", "auto,size=1MB"])


@pytest.mark.slow
def test_each_quick_choice_counts(page: Page, running: Served) -> None:
    """On a slow connection, where Gradio drops or mixes what comes before the last answer."""
    page.add_init_script(SLOW)
    person = Person(page, running.url)
    person.model("digits-flux")
    person.tab("Settings")
    table = page.locator("#schemes table")
    expect(table).to_be_visible()

    page.evaluate("() => { window.held = new Promise(release => window.release = release); }")
    page.get_by_role("button", name="Size").click()
    table.locator("tbody[data-group='4-bit'] tr[data-scheme=nf4]").get_by_role("radio").check()
    page.locator("#scheme-for").get_by_label("Text encoders").check()
    table.locator("tbody[data-group='8-bit'] tr[data-scheme=int8]").get_by_role("radio").check()
    for box, scheme in (("#set-quant-model input", "nf4"), ("#set-quant-text-encoder input", "int8")):
        expect(page.locator(box)).to_have_value(re.compile(rf"^{scheme}($|\s)"))  # without the server
    page.evaluate("release()")
    expect(table.locator("th[aria-sort=ascending]")).to_contain_text("Size")
    expect(page.locator("#verdict [data-name=transformer]")).to_contain_text("nf4")
    assert (person.value("quant.model"), person.value("quant.text_encoder")) == ("nf4", "int8")

    for name in ("Fits 6 GB", "Fastest", "Best quality"):
        page.get_by_role("button", name=name).click()
    expect(page.locator("#preset-said")).to_contain_text("Best quality")
    assert person.value("quant.model") == "As in the file"

    for name in ("Generate", "Inspect", "Compare", "Convert"):
        person.tab(name)
    for name in ("GGUF", "ComfyUI", "Folder", "GGUF"):
        page.locator("#convert-kind").get_by_label(re.compile(name)).check()
    expect(page.locator("#convert-scheme input")).to_have_value("q8_0")
    expect(page.locator("#convert-seen")).to_contain_text("q8_0: ")
    expect(page.locator("#convert-name :is(input, textarea)")).to_have_value("digits-flux-q8_0")

"""The page without a mouse: Tab reaches every widget, in the order of the page, with a visible focus and a name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

from .person import Person, digit

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.xdist_group("browser")

# What has the focus: whether it is inside an element, how it is called, whether one sees it.
NAME = """element => element.getAttribute("aria-label") || element.title || element.labels?.[0]?.innerText
    || element.innerText || element.querySelector("img")?.alt || ''"""
SEEN = """element => {
    const style = getComputedStyle(element), box = element.getBoundingClientRect();
    return style.outlineStyle === "solid" && parseFloat(style.outlineWidth) >= 2 && box.width > 0 && box.height > 0
}"""
IDS = "element => { const ids = []; for (; element; element = element.parentElement) ids.push(element.id); return ids }"


class Keys:
    """Somebody with a keyboard only."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def steps(self) -> Iterator[list[str]]:
        """Press Tab again and again; the ids of what then has the focus, from the inside out."""
        for _ in range(60):
            self.page.keyboard.press("Tab")
            focus = self.page.evaluate_handle("document.activeElement").as_element()
            assert focus is not None
            ids = focus.evaluate(IDS)
            if focus.evaluate("element => element === document.body"):
                continue  # from the last widget to the browser's own, and back to the first
            assert focus.evaluate(SEEN), ids
            assert focus.evaluate(NAME).strip(), ids
            yield ids

    def reach(self, box: str) -> None:
        """Go on to the first widget inside the element with this id."""
        for ids in self.steps():
            if box in ids:
                return
        raise AssertionError(f"{box} is not reached")

    def tab(self, name: str) -> None:
        """Go to a tab of the page."""
        for _ in self.steps():
            focus = self.page.locator("[role=tab]:focus")
            if focus.count() and focus.inner_text().startswith(name):
                break
        self.page.keyboard.press("Enter")
        expect(self.page.get_by_role("tab", name=re.compile(f"^{name}"))).to_have_attribute("aria-selected", "true")

    def press(self, box: str) -> None:
        """Go to a button and press it."""
        self.reach(box)
        self.page.keyboard.press("Enter")

    def choose(self, box: str, text: str) -> None:
        """Go to a list of choices, write into it, and take the first that is left."""
        self.write(box, text)
        expect(self.page.get_by_role("option").first).to_contain_text(text)
        self.page.keyboard.press("Enter")
        expect(self.page.get_by_role("listbox")).to_have_count(0)
        expect(self.page.locator(f"#{box} input")).to_have_value(re.compile(f"^{re.escape(text)}"))

    def write(self, box: str, text: str) -> None:
        """Go to a box and write into it."""
        self.reach(box)
        self.page.keyboard.press("Control+A")
        self.page.keyboard.type(text)


@pytest.fixture
def keys(person: Person) -> Keys:
    return Keys(person.page)


def test_draw_and_cancel(keys: Keys, person: Person) -> None:
    page = keys.page
    keys.choose("model", "digits-sd")
    keys.write("prompt", "a handwritten two")
    keys.write("steps", "8")
    keys.reach("prompt")
    page.keyboard.press("Enter")
    person.done()
    assert digit(person.image()) == 2
    assert page.locator("#prompt textarea").input_value() == "a handwritten two"

    keys.write("steps", "200")
    person.size(256)  # else it may have ended before Cancel is reached
    keys.press("draw")
    expect(page.locator("#status [role=progressbar]")).to_contain_text(re.compile("step [1-9]"))
    told = page.locator("#progress-told[aria-live=polite]")
    expect(told).to_have_text(re.compile(r"^Generating(, \d+ %)?$"))  # and not every step
    keys.press("cancel")
    expect(page.locator("#status[aria-live=polite] [role=status]")).to_contain_text("Cancelled")
    expect(told).to_have_text("")


def test_settings_fix_and_apply(keys: Keys, person: Person) -> None:
    page = keys.page
    keys.choose("model", "digits-sd")
    keys.tab("Settings")
    keys.choose("set-quant-model", "qint8")
    expect(page.locator("#verdict [data-name=unet]")).to_contain_text("qint8")
    keys.choose("set-offload", "balanced")
    expect(page.locator("#verdict[aria-live=polite] [role=alert]")).to_contain_text(
        re.compile("alanced offload moves single layers")
    )
    keys.press("fix-0")
    expect(page.locator("#verdict [role=status]")).to_contain_text("works")
    assert person.value("offload") == "model"
    keys.press("apply")
    expect(page.locator("#applied[aria-live=polite] [role=status]")).to_contain_text("Applied")
    expect(page.locator("#in-memory")).to_contain_text("qint8, model offload")


def test_inspect_and_compare_without_one_of_the_schemes(keys: Keys) -> None:
    keys.tab("Inspect")
    keys.choose("file", "digits-sd/unet")
    expect(keys.page.locator("#found[aria-live=polite] [role=status]")).to_contain_text("digits-sd/unet")

    keys.tab("Compare")
    chosen = keys.page.locator("#compare-schemes .token")
    expect(chosen.first).to_be_visible()
    many = chosen.count()
    keys.reach("compare-schemes")
    name = keys.page.locator(":focus").get_attribute("aria-label")
    assert name == f"Remove {chosen.first.inner_text().strip()}"
    keys.page.keyboard.press("Enter")
    expect(chosen).to_have_count(many - 1)


BAR = """() => {
    const bar = document.body.appendChild(document.createElement("div"));
    [bar.id, bar.className, bar.textContent] = ["bar", "sq-progress", "a bar"];
    [bar.ariaLabel, bar.ariaValueNow] = ["Loading", "0"];
}"""
STEP = "([label, share]) => { [bar.ariaValueNow, bar.ariaLabel] = [share, label] }"


def test_a_bar_that_is_changed_and_not_replaced_is_told_of(keys: Keys) -> None:
    """Gradio does either: a reader heard "Loading" to the end of a drawing."""
    page, told = keys.page, keys.page.locator("#progress-told[aria-live=polite]")
    page.evaluate(BAR)
    expect(told).to_have_text("Loading")
    for label, share, text in (
        ("Generating, step 1 of 200", "0", "Generating"),
        ("Generating, step 60 of 200", "30", "Generating, 25 %"),
        ("Saving", "0", "Saving"),
    ):
        page.evaluate(STEP, [label, share])
        expect(told).to_have_text(text)
    page.evaluate("bar.remove()")
    expect(told).to_have_text("")


ORDER = {
    "Generate": ["model", "again", "prompt", "draw", "steps", "seed"],
    "Settings": [
        "model", "again", "preset-fits-6gb", "preset-fastest", "set-quant-model", "set-quant-vae", "set-offload",
        "set-budget", "set-mode", "set-skip", "set-cache", "more", "apply", "export", "import", "reset",
    ],
    "Inspect": ["model", "again", "file", "files-again", "verify"],
    "Compare": ["model", "again", "compare-prompt", "compare-schemes", "compare-steps", "compare-run"],
}  # fmt: skip


def test_the_order_is_that_of_the_page_and_no_list_stays_open(keys: Keys) -> None:
    for tab, order in ORDER.items():
        keys.tab(tab)
        keys.reach("model")
        passed = ["model"]
        for ids in keys.steps():
            expect(keys.page.get_by_role("listbox")).to_have_count(keys.page.locator("[role=combobox]:focus").count())
            if "model" in ids:
                break
            passed += [box for box in order if box in ids and box not in passed]
        assert passed == order

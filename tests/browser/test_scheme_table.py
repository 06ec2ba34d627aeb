"""The table of schemes: what a person sees of each, searches, sorts, chooses, and why some cannot be chosen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, Route, expect

from sdquant.core import registry

from .person import Person

if TYPE_CHECKING:
    from ..ui.conftest import Served

pytestmark = pytest.mark.xdist_group("browser")


def test_choose_by_what_one_cares_about(person: Person) -> None:
    """One way through all of it: opening a page takes longer than the rest."""
    page = person.page
    person.model("digits-sd")
    person.tab("Settings")
    table = page.locator("#schemes table")
    expect(table).to_be_visible()

    # Every scheme is there by name, with a line of what it is, and in its group.
    shown = set(table.locator("tr[data-scheme]").evaluate_all("rows => rows.map(row => row.dataset.scheme)"))
    assert shown == {row.name for row in registry.schemes() if row.name != "rules"} | {"none"}
    groups = table.locator("tbody").evaluate_all("parts => parts.map(part => part.dataset.group)")
    assert groups == ["recommended", "original", "8-bit", "4-bit", "smaller", "files"]
    nf4 = table.locator("tbody[data-group='4-bit'] tr[data-scheme=nf4]")
    expect(nf4).to_contain_text(re.compile(r"nf4.*NormalFloat.*MB \(\d+%\).*fits"))
    expect(nf4.locator(".sq-stars")).to_have_attribute("title", re.compile("^3 of 5: same picture"))
    expect(table.locator("[data-group=recommended]")).to_contain_text("Looks like the original")

    # Chosen: the fields follow, the verdict too, and the row stays marked.
    nf4.get_by_role("radio").check()
    expect(page.locator("#verdict [data-name=unet]")).to_contain_text("nf4")
    assert (person.value("quant.model"), person.value("quant.text_encoder")) == ("nf4", "nf4")
    expect(nf4).to_have_class(re.compile("sq-chosen"))
    expect(nf4.get_by_role("radio")).to_be_focused()
    page.locator("#scheme-for").get_by_label("Text encoders").check()
    table.locator("tbody[data-group='8-bit'] tr[data-scheme=int8]").get_by_role("radio").check()
    expect(page.locator("#verdict [data-name=text_encoder]")).to_contain_text("int8")
    assert person.value("quant.model") == "nf4"

    # Why not: of one scheme with these settings, and of all files.
    person.set("offload", "balanced")
    quanto = table.locator("tbody[data-group='8-bit'] tr[data-scheme=qint8]")
    expect(quanto.get_by_role("radio")).to_be_disabled()
    expect(quanto.or_(table.locator("[data-group='8-bit'] .sq-group")).get_by_text("Why not").first).to_be_visible()
    files = table.locator("[data-group=files] .sq-group details").filter(has_text="Convert tab")  # one of two reasons
    files.locator("summary").click()
    expect(files.get_by_text("Convert tab").last).to_be_visible()
    assert "offload=" not in page.locator("#schemes").inner_text()

    # Sorted within groups, and searched.
    table.get_by_role("button", name="Size").click()
    expect(table.locator("th[aria-sort=ascending]")).to_contain_text("Size")
    sizes = table.locator("[data-group='8-bit'] td[data-label=Size]").evaluate_all("all => all.map(e => e.innerText)")
    assert sizes == sorted(sizes, key=lambda text: float(text.split()[0])) and len(sizes) > 5
    person.write("scheme-search", "sdnq 4-bit")
    expect(table.locator("tr[data-scheme=nf4]")).to_have_count(0)
    expect(table.locator("tr[data-scheme=sdnq-int4]").last).to_be_visible()
    person.write("scheme-search", "<img src=x>")
    expect(table).to_contain_text("No scheme has these words")


def test_a_choice_before_the_page_has_its_answers_stays(page: Page, running: Served) -> None:
    before = Person(page, running.url)
    before.tab("Settings")
    expect(page.locator("#settings-now :is(input, textarea)")).to_have_value(re.compile("^.+"))
    expect(page.locator("#schemes table")).to_be_visible()
    before.set("quant.text_encoder", "int8")
    expect(before.apply()).to_contain_text("Applied")
    held: list[Route] = []
    chosen = False

    def answer(route: Route) -> None:
        if chosen:
            route.continue_()
        else:
            held.append(route)

    page.route("**/queue/data?*", answer)
    person = Person(page, running.url)
    person.tab("Settings")
    person.set("quant.model", "nf4")
    expect(page.locator("#set-quant-text-encoder input")).not_to_have_value("int8")  # but that of the server's start
    chosen = True
    for route in held:
        route.continue_()
    expect(page.locator("#verdict [data-name=transformer]")).to_contain_text("nf4")
    assert person.value("quant.model") == "nf4"
    assert person.value("quant.text_encoder") == "int8"  # which was applied since
    expect(page.locator("#schemes table")).to_be_visible()
    expect(page.locator("#schemes .sq-chosen")).to_have_count(0)  # the text encoders have another one


# What the table shows beside which chosen model, at every change of it.
WATCH = """() => {
    window.seen = [];
    const look = () => {
        const size = document.querySelector("#schemes [data-group=original] td[data-label=Size]");
        const model = document.querySelector("#model input").value;
        seen.push([model, (size ?? document.querySelector("#schemes")).innerText]);
    };
    new MutationObserver(look).observe(document.querySelector("#schemes"), { childList: true, subtree: true });
}"""


def test_another_models_sizes_are_not_shown(page: Page, running: Served) -> None:
    """From the choice of a model until its answer is there, the page says that it is looking."""
    person = Person(page, running.url)
    person.tab("Settings")
    original = page.locator("#schemes [data-group=original] td[data-label=Size]")
    expect(original).to_be_visible()
    sizes = {}
    page.evaluate(WATCH)
    for name in ("digits-sd", "digits-flux"):
        before = original.inner_text()
        person.model(name)
        expect(original).to_be_visible()
        expect(original).not_to_have_text(before)
        sizes[name] = original.inner_text()
    seen = {(model, text.strip()) for model, text in page.evaluate("seen")}
    notes = {(model, f"Looking at {model} …") for model in sizes}
    assert notes <= seen <= notes | set(sizes.items())
    expect(page.locator("#schemes")).not_to_contain_text("computing …")  # the speeds come when a step was traced
    expect(page.locator("#schemes tr[data-scheme=int8] td[data-label=Speed]").last).not_to_be_empty()


# Each question takes a while to arrive, and one knows when the last one was sent.
SLOW = """
    const send = window.fetch;
    window.fetch = async (...all) => {
        if (!String(all[0]?.url ?? all[0]).includes("queue/join")) return send(...all);
        await new Promise(resolve => setTimeout(resolve, 500));
        await window.held;  // a promise while the server is out of reach
        window.lastQuestion = performance.now();
        return send(...all);
    };
"""


def test_questions_end(page: Page, running: Served) -> None:
    """Choices that come faster than answers are answered once: the page asked for ever, and showed nothing."""
    page.add_init_script(SLOW)
    person = Person(page, running.url)
    person.tab("Settings")
    expect(page.locator("#schemes table")).to_be_visible()
    for model, scheme in (("digits-sd", "nf4"), ("digits-flux", "int8")) * 2:
        person.model(model)
        person.set("quant.model", scheme)
        person.set("quant.text_encoder", scheme)
    page.wait_for_function("performance.now() - lastQuestion > 4000")
    expect(page.locator("#verdict [data-name=transformer]")).to_contain_text("int8")
    expect(page.locator("#schemes tr.sq-chosen[data-scheme=int8]").first).to_be_visible()

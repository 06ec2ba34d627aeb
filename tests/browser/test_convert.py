"""A model converted to a GGUF file, a ComfyUI file and a folder, from the page; each is what it says, and loads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

import sdquant

if TYPE_CHECKING:
    from ..ui.conftest import Served
    from .person import Person

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.slow]


def test_convert(person: Person, running: Served) -> None:
    page = person.page
    person.model("digits-flux")
    person.tab("Convert")
    for label, first, scheme, file in (
        ("GGUF file", "q8_0", "q8_0", "digits-flux-q8_0.gguf"),
        ("ComfyUI file", "int8_convrot", "int8_row", "digits-flux-int8_row.safetensors"),
        ("Folder", "int8_row", "nf4", "digits-flux-nf4"),
    ):
        page.locator("#convert-kind").get_by_label(re.compile(label)).check()
        expect(page.locator("#convert-scheme input")).to_have_value(first)
        person.pick("convert-scheme", scheme)
        expect(page.locator("#convert-seen")).to_contain_text(re.compile(rf"{scheme}: .* MB"))
        expect(page.locator("#convert-name :is(input, textarea)")).to_have_value(file.partition(".")[0])
        page.locator("#convert-run").click()
        expect(page.locator("#convert-status")).to_contain_text(file)
        expect(page.locator("#convert-status .sq-ok")).to_be_visible()
        detected = sdquant.detect(running.models / file)
        quants = {part.quant for part in (detected.parts or {"": detected}).values() if part.quant}
        assert quants == {scheme}
    page.locator("#convert-run").click()
    expect(page.locator("#convert-status .sq-breaks")).to_contain_text("there is a digits-flux-nf4 already")
    person.write("convert-name", "../out")
    page.locator("#convert-run").click()
    expect(page.locator("#convert-status .sq-breaks")).to_contain_text("letters, digits")
    person.model("models/digits-flux-nf4")
    expect(page.locator("#convert-seen .sq-breaks").or_(page.locator("#convert-seen .sq-info"))).to_be_visible()

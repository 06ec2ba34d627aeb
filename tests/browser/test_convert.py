"""A model converted to a GGUF file, a ComfyUI file and a folder, from the page; each is what it says, and loads.

So is a mix; and of a conversion that is cancelled nothing is left.
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

import sdquant

from ..sparse_pipelines import FLUX, component

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


def test_a_mix(person: Person, running: Served) -> None:
    page = person.page
    person.model("digits-flux")
    person.tab("Convert")
    page.locator("#convert-kind").get_by_label(re.compile("ComfyUI file")).check()
    expect(page.locator("#convert-scheme input")).to_have_value("int8_convrot")
    expect(page.locator("#convert-size")).to_be_hidden()
    person.pick("convert-scheme", "A mix: the best picture for a size")
    size = page.locator("#convert-size :is(input, textarea)")
    expect(size).to_have_value(re.compile("^[0-9.]+MB$"))
    seen = page.locator("#convert-seen .sq-info")
    expect(seen).to_contain_text(re.compile(r"A mix: at most .* MB.*It takes about \d+ s here", re.DOTALL))
    size.fill("10KB")
    refused = page.locator("#convert-seen .sq-breaks")
    expect(refused).to_contain_text("Write")
    expect(page.locator("#convert-run")).to_be_disabled()
    least = re.search(r"Write ([0-9.]+MB) or more", refused.inner_text())
    assert least is not None and "=" not in refused.inner_text()
    size.fill(least[1])
    expect(page.locator("#convert-run")).to_be_enabled()
    page.locator("#convert-run").click()
    done = page.locator("#convert-status .sq-ok")
    expect(done).to_contain_text("models/digits-flux-mix.safetensors")
    expect(done).to_contain_text("its own node 'Load Diffusion Model'")
    written = running.models / "digits-flux-mix.safetensors"
    assert written.stat().st_size <= float(least[1].removesuffix("MB")) * 1e6
    (source,) = sdquant.detect(written).sources.values()
    assert len({weight.scheme for weight in source.prequantized.values()}) > 1


def test_cancel(person: Person, running: Served) -> None:
    page = person.page
    folder = shutil.copytree(sdquant.demo.path("digits-flux"), running.models / "wide")
    shutil.rmtree(folder / "transformer")
    name, values = FLUX["transformer"]
    component(folder / "transformer", name, {**values, "num_layers": 2, "num_single_layers": 4})
    try:
        page.locator("#again").click()
        person.model("models/wide")
        person.tab("Convert")
        page.locator("#convert-kind").get_by_label(re.compile("GGUF file")).check()
        expect(page.locator("#convert-scheme input")).to_have_value("q8_0")
        person.pick("convert-scheme", "q4_k")
        expect(page.locator("#convert-seen")).to_contain_text("q4_k:")
        before = {path.name for path in running.models.iterdir()}
        page.locator("#convert-run").click()
        expect(page.locator("#convert-status [role=progressbar]")).to_contain_text(re.compile("Converting, [1-9]"))
        page.reload()  # which ends nothing, and goes on where one was
        expect(page.get_by_role("tab", name="Convert")).to_have_attribute("aria-selected", "true")
        expect(page.locator("#convert-status [role=progressbar]")).to_contain_text("Converting")
        expect(page.locator("#convert-status")).to_contain_text("models/wide-q4_k.gguf")
        expect(page.locator("#convert-seen .sq-card")).to_be_visible()
        page.locator("#convert-cancel").click()
        expect(page.locator("#convert-status .sq-info")).to_contain_text("Nothing was written")
        assert {path.name for path in running.models.iterdir()} == before
        expect(page.locator("#convert-run")).to_be_enabled()
    finally:
        shutil.rmtree(folder)

"""What people come for, by what they see on the page: each of these is a walk of docs/walks.md."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

import sdquant
from sdquant import demo
from sdquant.saving import export_gguf

from ..sparse_pipelines import flux
from .person import digit

if TYPE_CHECKING:
    from ..ui.conftest import Served
    from .person import Person

pytestmark = pytest.mark.xdist_group("browser")


def _as_installed(person: Person) -> None:
    """Take back what other tests have applied: the server and its settings are those of all of them."""
    person.tab("Settings")
    person.set("quant.model", "As in the file")
    person.set("quant.text_encoder", "As in the file")
    person.set("offload", "none")
    expect(person.apply()).to_contain_text("Applied")
    person.tab("Generate")


def test_make_it_fit(person: Person, running: Served) -> None:
    page = person.page
    flux(running.models / "flux1-dev")
    try:
        page.locator("#again").click()
        person.model("models/flux1-dev")
        person.tab("Settings")
        page.get_by_role("button", name="Fits 8 GB").click()
        expect(page.locator("#verdict .sq-works")).to_be_visible()
        expect(page.locator("#verdict [data-name=Total]")).to_contain_text("in turns, in 6.38 GB")
        expect(page.locator("#verdict .sq-over")).to_have_count(0)
    finally:
        shutil.rmtree(running.models / "flux1-dev")


def test_a_gguf_with_ones_own_t5(person: Person, running: Served) -> None:
    page = person.page
    transformer, t5 = running.models / "flux-Q8_0.gguf", running.models / "t5-Q8_0.gguf"
    export_gguf.quantize_file(demo.path("digits-flux"), "q8_0", transformer, progress=False)
    export_gguf.quantize_file(demo.path("digits-flux") / "text_encoder_2", "q8_0", t5, progress=False)
    page.locator("#again").click()
    others = page.get_by_label("Together with")
    person.model("digits-flux")
    expect(others).to_be_disabled()  # a whole pipeline needs nothing
    tabs = page.get_by_role("tablist").first
    place = tabs.bounding_box()
    person.model("models/flux-Q8_0.gguf")
    expect(page.locator("#base")).to_contain_text("digits-flux")  # a pipeline that it goes with is found
    assert tabs.bounding_box() == place  # the page stands still
    _as_installed(person)
    others.click()
    choices = page.get_by_role("option")
    expect(choices.filter(has_text="models/t5-Q8_0.gguf")).to_have_count(1)
    expect(choices.filter(has_text="models/flux-Q8_0.gguf")).to_have_count(0)  # not with itself
    page.get_by_role("option", name="models/t5-Q8_0.gguf").click()
    page.keyboard.press("Escape")
    expect(page.locator("#base")).to_contain_text("models/t5-Q8_0.gguf")
    assert tabs.bounding_box() == place
    page.set_viewport_size({"width": 390, "height": 844})
    place = tabs.bounding_box()
    person.model("digits-flux")
    expect(others).to_be_disabled()
    assert tabs.bounding_box() == place
    person.model("models/flux-Q8_0.gguf")
    expect(others).to_be_enabled()
    page.set_viewport_size({"width": 1280, "height": 900})
    others.click()
    page.get_by_role("option", name="models/t5-Q8_0.gguf").click()
    page.keyboard.press("Escape")
    expect(page.locator("#base")).to_contain_text("models/t5-Q8_0.gguf")
    assert digit(person.draw("a handwritten six")) == 6
    expect(page.locator("#facts")).to_contain_text(re.compile("text_encoder_2.*q8_0, as in the file", re.DOTALL))
    others.click()
    page.get_by_role("option", name="digits-sd", exact=True).click()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.locator("#status .sq-breaks")).to_contain_text("with two pipelines")


def test_an_fp8_file_for_comfyui(person: Person, running: Served) -> None:
    page = person.page
    file = running.models / "flux-fp8.safetensors"
    sdquant.save(sdquant.load_model(demo.path("digits-flux") / "transformer", "fp8", progress=False), file)
    page.reload()  # which lists new files as "Refresh" does
    person.model("models/flux-fp8.safetensors")
    person.tab("Convert")
    page.locator("#convert-kind").get_by_label(re.compile("ComfyUI")).check()
    expect(page.locator("#convert-scheme input")).to_have_value("int8_convrot")
    expect(page.locator("#convert-seen")).to_contain_text("in fp8 already")
    page.locator("#convert-run").click()
    done = page.locator("#convert-status .sq-ok")
    expect(done).to_contain_text("models/flux-fp8-int8_convrot.safetensors")
    expect(done).to_contain_text("its own node 'Load Diffusion Model'")
    assert sdquant.detect(Path(running.models / "flux-fp8-int8_convrot.safetensors")).quant == "int8_convrot"

"""Several images with a negative prompt and a sampler; their settings come back from the picture."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from playwright.sync_api import expect

from sdquant.ui import infotext

if TYPE_CHECKING:
    from pathlib import Path

    from .person import Person

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.slow]


def test_a_picture_gives_its_settings_back(person: Person, tmp_path: Path) -> None:
    page = person.page
    person.model("digits-flux")
    expect(page.locator("#negative")).to_have_count(0)
    person.model("digits-sd")
    person.write("negative", "a handwritten one")
    person.pick("sampler", "DPM++ 2M")
    page.get_by_role("button", name="Size and batch").click()
    page.locator("#count input").fill("2")
    page.locator("#guidance input").fill("3")
    page.locator("#seed input").fill("5")
    person.draw("a handwritten seven", steps=8)
    expect(page.locator("#gallery img")).to_have_count(2)

    source = page.locator("#image img").get_attribute("src") or ""
    kept = page.request.get(source).body()
    found = infotext.parse(Image.open(io.BytesIO(kept)).info[infotext.KEY])
    assert (found["Prompt"], found["Negative prompt"]) == ("a handwritten seven", "a handwritten one")
    assert (found["Steps"], found["Sampler"], found["Seed"], found["CFG scale"]) == ("8", "DPM++ 2M", "5", "3.0")
    assert found["Model"] == "digits-sd" and found["Quantization"].startswith("original")
    (tmp_path / "picture.png").write_bytes(kept)

    person.write("prompt", "something else")
    person.write("negative", "")
    page.locator("#steps input[type=number]").fill("3")
    page.locator("#dropped input[type=file]").set_input_files(tmp_path / "picture.png")
    expect(page.locator("#status")).to_contain_text("Settings taken from the picture")
    expect(page.locator("#prompt textarea")).to_have_value("a handwritten seven")
    expect(page.locator("#negative textarea")).to_have_value("a handwritten one")
    expect(page.locator("#steps input[type=number]")).to_have_value("8")
    expect(page.locator("#sampler input")).to_have_value("DPM++ 2M")
    page.locator("#count input").fill("1")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.locator("#gallery img")).to_have_count(3)
    again = page.request.get(page.locator("#image img").get_attribute("src") or "").body()
    assert Image.open(io.BytesIO(again)).tobytes() == Image.open(io.BytesIO(kept)).tobytes()

"""LoRAs on the Generate tab: chosen with strengths, written into the picture, taken from it, and taken off again."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from playwright.sync_api import expect

from sdquant.ui import infotext

from ..lora.conftest import lora_file

if TYPE_CHECKING:
    from ..ui.conftest import Served
    from .person import Person

__all__ = ["lora_file"]

pytestmark = pytest.mark.xdist_group("browser")


def kept(person: Person) -> tuple[bytes, bytes]:
    """The picture that the page shows: the file, and its pixels."""
    source = person.page.locator("#image img").get_attribute("src") or ""
    body = person.page.request.get(source).body()
    return body, Image.open(io.BytesIO(body)).tobytes()


def test_put_on_and_taken_off(person: Person, running: Served, lora_file: Callable[..., Path], tmp_path: Path) -> None:
    folder = running.models / "loras"
    folder.mkdir()
    for name, kohya in (("ink", True), ("chalk", False)):
        shutil.copy(lora_file("digits-sd", False, kohya), folder / f"{name}.safetensors")
    page = person.page
    person.model("digits-sd")
    person.draw("a handwritten seven", steps=4)
    _, plain = kept(person)

    page.locator("#again").click()
    page.get_by_role("button", name=re.compile("^LoRA")).click()
    expect(page.locator("#lora-1")).to_have_count(0)
    person.pick("lora-0", "models/loras/ink")
    person.pick("lora-1", "models/loras/chalk")
    page.locator("#lora-strength-0 input").fill("1.5")
    person.draw("a handwritten seven", steps=4)
    expect(page.locator("#facts")).to_contain_text("ink 1.5, chalk 1")
    body, changed = kept(person)
    assert changed != plain
    found = infotext.parse(Image.open(io.BytesIO(body)).info[infotext.KEY])
    assert found["Prompt"] == "a handwritten seven <lora:ink:1.5> <lora:chalk:1>"
    page.locator("#model input").click()
    names = page.get_by_role("option").all_inner_texts()
    assert not [name for name in names if "ink" in name]  # a LoRA is no model
    page.keyboard.press("Escape")

    person.pick("lora-1", "None")
    person.pick("lora-0", "None")
    person.draw("a handwritten seven", steps=4)
    assert kept(person)[1] == plain

    (tmp_path / "notes.txt").write_text("no picture")
    page.locator("#dropped input[type=file]").set_input_files(tmp_path / "notes.txt")
    expect(page.locator("#status .sq-breaks")).to_contain_text("it is not a PNG file")
    expect(page.locator(".toast-body")).to_have_count(0)  # Gradio's own error
    (tmp_path / "picture.png").write_bytes(body)
    page.locator("#dropped input[type=file]").set_input_files(tmp_path / "picture.png")
    expect(page.locator("#status")).to_contain_text("LoRA ink 1.5, LoRA chalk 1")
    expect(page.locator("#lora-1 input")).to_have_value("models/loras/chalk")
    expect(page.locator("#lora-strength-0 input")).to_have_value("1.5")
    expect(page.locator("#prompt textarea")).to_have_value("a handwritten seven")
    person.draw("a handwritten seven", steps=4)
    assert kept(person)[1] == changed

    person.write("prompt", "a handwritten seven <lora:oil:1>")
    page.get_by_role("button", name="Generate", exact=True).click()
    expect(page.locator("#status .sq-breaks")).to_contain_text("the LoRA 'oil'")


# A file that is dropped on a box, as the browser says it.
DROP = """([to, name, bytes]) => {
    const files = new DataTransfer();
    files.items.add(new File([new Uint8Array(bytes)], name));
    const drop = new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true });
    document.querySelector(to).dispatchEvent(drop);
}"""


@pytest.mark.slow
def test_a_dropped_file(person: Person, running: Served, lora_file: Callable[..., Path]) -> None:
    page = person.page
    raw = lora_file("digits-sd", False, True).read_bytes()
    person.model("digits-sd")
    page.get_by_role("button", name=re.compile("^LoRA")).click()
    page.evaluate(DROP, ["#lora-file button", "dropped.safetensors", list(raw)])
    expect(page.locator("#lora-said")).to_contain_text("Added: models/loras/dropped.safetensors")
    expect(page.locator("#lora-0 input")).to_have_value("models/loras/dropped")
    assert (running.models / "loras" / "dropped.safetensors").read_bytes() == raw
    person.draw("a handwritten seven", steps=4)
    expect(page.locator("#facts")).to_contain_text("dropped 1")
    page.evaluate(DROP, ["#lora-file button", "notes.safetensors", list(b"no model")])
    expect(page.locator("#lora-said .sq-breaks")).to_contain_text("Cannot use notes.safetensors as a LoRA")
    assert not (running.models / "loras" / "notes.safetensors").exists()

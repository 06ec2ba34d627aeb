"""Images to start from: files, and those of the gallery by the button or dropped; as a whole and in a painted part."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from PIL import Image, ImageChops
from playwright.sync_api import expect

from sdquant.ui import infotext

if TYPE_CHECKING:
    from pathlib import Path

    from .person import Person

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.slow]


# A file that is dropped, as the browser says it.
DROP = """to => {
    const files = new DataTransfer();
    files.items.add(new File([new Uint8Array(33 << 20)], "big.png", { type: "image/png" }));
    const drop = new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true });
    document.querySelector(to).dispatchEvent(drop);
}"""


def shown(person: Person) -> Image.Image:
    """The picture that the page shows."""
    source = person.page.locator("#image img").get_attribute("src") or ""
    return Image.open(io.BytesIO(person.page.request.get(source).body()))


def test_a_file_of_ones_own(person: Person, tmp_path: Path) -> None:
    """What is no picture is refused in a sentence; a photo is turned upright, of a kind that no browser opens too."""
    page = person.page
    person.model("digits-sd")
    page.locator("#start-box button").first.click()
    choose = page.locator("#start input[type=file]").first
    (tmp_path / "notes.png").write_text("no picture")
    choose.set_input_files(tmp_path / "notes.png")
    expect(page.locator("#start-said .sq-breaks")).to_contain_text("Cannot start from notes.png")
    page.evaluate(DROP, "#start > *")
    expect(page.locator("#file-refused[role=alert]")).to_contain_text("big.png is larger than 32 MB")
    page.locator("#file-refused button").click()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (96, 48), "white").save(tmp_path / "photo.tiff", exif=exif)
    choose.set_input_files(tmp_path / "photo.tiff")
    expect(page.locator("#start").get_by_role("button", name="Brush", exact=True)).to_be_visible()
    expect(page.locator("#start-said .sq-card")).to_have_count(0)
    # The editor takes a picture over only after it has shown it.
    expect(page.locator("#start canvas").first).to_be_visible()
    drawn = person.draw("a handwritten one", steps=4)
    assert drawn.height > drawn.width


def test_draw_a_part_anew(person: Person) -> None:
    page = person.page
    person.model("digits-sd")
    first = person.draw("a handwritten seven", steps=6).convert("RGB")
    page.locator("#start-box button").first.click()
    editor = page.locator("#start")
    expect(editor).to_be_visible()
    page.locator("#gallery img").first.drag_to(editor)
    expect(editor.get_by_role("button", name="Brush", exact=True)).to_be_visible()
    expect(editor.locator("canvas").first).to_be_visible()
    page.locator("#strength input[type=number]").fill("0.5")
    whole = person.draw("a handwritten one", steps=6).convert("RGB")
    assert whole.size == first.size and whole.tobytes() != first.tobytes()
    assert infotext.parse(shown(person).info[infotext.KEY])["Denoising strength"] == "0.5"

    page.locator("#start-use").click()
    expect(person.page.locator("#start canvas").first).to_be_visible()
    editor.get_by_role("button", name="Brush", exact=True).click()
    editor.scroll_into_view_if_needed()
    box = editor.locator("canvas").first.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2 - 130, box["y"] + box["height"] / 2  # at the left edge of the image
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 4, y + 4, steps=4)
    page.mouse.up()
    page.locator("#strength input[type=number]").fill("1")
    part = person.draw("a handwritten four", steps=6).convert("RGB")
    changed = ImageChops.difference(part, whole).getbbox()
    assert changed is not None and changed[0] < whole.width // 4 and changed[2] <= whole.width * 3 // 4

"""What a person does on the page, by what they see: labels, buttons, words."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page, expect

from sdquant.settings import field_named
from sdquant.training.digits import judge

from ..patience import PATIENCE


@dataclass
class Person:
    """Somebody in front of a page. `goto`: whether it is to be opened."""

    page: Page
    url: str
    goto: bool = True

    def __post_init__(self) -> None:
        self.page.set_default_timeout(1000 * PATIENCE)  # as `expect` waits, not Playwright's 30 s
        if self.goto:
            self.page.goto(self.url)
        expect(self.page.get_by_role("button", name="Generate", exact=True)).to_be_enabled()
        # Gradio runs the page's own script a tenth of a second later, and nobody presses Tab before that.
        expect(self.page.locator("#status")).to_have_attribute("aria-live", "polite")

    def tab(self, name: str) -> None:
        """Go to a tab."""
        self.page.get_by_role("tab", name=re.compile(f"^{name}")).click()

    def pick(self, box: str, choice: str) -> None:
        """Choose in the dropdown with this id."""
        field = self.page.locator(f"#{box} input")
        field.click()
        name = re.escape(choice).replace("/", r"\/")  # Playwright writes it between slashes
        self.page.get_by_role("option", name=re.compile(rf"^(✓\s*)?{name}($|\s+[✕?◔])")).click()
        expect(field).to_have_value(re.compile(rf"^{name}($|\s+[✕?◔])"))
        expect(self.page.get_by_role("option")).to_have_count(0)  # the list fades out, and the next may have this name

    def model(self, name: str) -> None:
        """Choose the model."""
        self.pick("model", name)

    def set(self, field: str, choice: str) -> None:
        """Choose in the settings."""
        assert field_named(field)
        self.pick("set-" + field.replace(".", "-").replace("_", "-"), choice)

    def value(self, field: str) -> str:
        """What a setting's widget shows."""
        box = self.page.locator(f"#set-{field.replace('.', '-').replace('_', '-')} :is(input, textarea)")
        return re.split(r"\s+[✕?◔]", box.input_value())[0]

    def write(self, box: str, text: str) -> None:
        """Type into the box with this id."""
        self.page.locator(f"#{box} :is(input, textarea)").first.fill(text)

    def draw(self, prompt: str, steps: int = 12) -> Image.Image:
        """Draw, wait for the image, and look at it."""
        self.tab("Generate")
        self.write("prompt", prompt)
        self.page.locator("#steps input[type=number]").fill(str(steps))
        before = self.page.locator("#facts dl").inner_html() if self.page.locator("#facts dl").count() else ""
        self.page.get_by_role("button", name="Generate", exact=True).click()
        self.done(before)
        return self.image()

    def size(self, side: int) -> None:
        """Write width and height; 0 is the model's own. Large images take longer than all that is done meanwhile."""
        if not self.page.locator("#width input").is_visible():
            self.page.get_by_role("button", name="Size and batch").click()
        for box in ("width", "height"):
            self.page.locator(f"#{box} input").fill(str(side))

    def done(self, before: str = "") -> None:
        """Wait for the end of a drawing that went well."""
        expect(self.page.locator("#status .sq-ok")).to_be_visible()
        facts = self.page.locator("#facts dl")
        expect(facts).to_be_visible()
        if before:
            expect(facts).not_to_have_js_property("innerHTML", before)
        expect(self.page.locator("#image img")).to_be_visible()

    def image(self) -> Image.Image:
        """The image that the page shows, as the server sent it."""
        source = self.page.locator("#image img").get_attribute("src")
        assert source is not None
        answer = self.page.request.get(source)
        assert answer.ok, answer.status
        return Image.open(io.BytesIO(answer.body()))

    def weights(self) -> tuple[int, int]:
        """Bytes of the weights, and of those on the device at most, as the page says beside the image."""
        facts = self.page.locator("#facts [data-weights]")
        return int(facts.get_attribute("data-weights") or 0), int(facts.get_attribute("data-peak") or 0)

    def upload(self, box: str, path: Path) -> None:
        """Choose a file for the upload button with this id."""
        with self.page.expect_file_chooser() as waiting:
            self.page.locator(f"#{box}").click()
        waiting.value.set_files(path)

    def apply(self) -> Locator:
        """Apply the settings; the box that says how that went, and not one that was there before."""
        box = self.page.locator("#applied")
        box.evaluate("box => box.querySelectorAll('.sq-card').forEach(card => card.classList.add('before'))")
        self.page.get_by_role("button", name="Apply and load").click()
        outcome = box.locator(".sq-card:not(.before)").first
        expect(outcome).to_be_visible()
        expect(box.locator(".sq-progress")).to_have_count(0)
        return outcome


def digit(image: Image.Image) -> int:
    """Which digit an image shows, by the judge that marks the demo."""
    return judge().read([image])[0]

"""The page on a laptop and on a phone, in light and dark: nothing sticks out, is faint or has no name, and a picture of
each tab is taken.

The pictures are for people: `pytest tests/browser/test_screenshots.py --basetemp=looks` keeps them in looks/.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from playwright.sync_api import Browser, expect

from . import looks
from .person import Person

if TYPE_CHECKING:
    from ..ui.conftest import Served

pytestmark = pytest.mark.xdist_group("browser")
TABS = ("Generate", "Settings", "Inspect", "Compare", "Convert")


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (390, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.slow),
        pytest.param(390, "light", marks=pytest.mark.slow),
    ],
)
def test_nothing_sticks_out(
    width: int, scheme: Literal["light", "dark"], chromium: Browser, running: Served, tmp_path: Path
) -> None:
    with chromium.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme) as context:
        page = context.new_page()
        person = Person(page, running.url)
        widths = set()
        bar = [row.bounding_box() or {} for row in page.get_by_role("tab").all()]
        assert len({box["y"] for box in bar}) == 1 and len(bar) == len(TABS)  # all in one line, none in a menu
        for tab in TABS:
            person.tab(tab)
            if tab == "Settings":
                expect(page.locator("#verdict .sq-card")).to_be_visible()
                expect(page.locator("#schemes table")).to_be_visible()
            if tab == "Inspect":
                person.pick("file", "digits-sd")
                expect(page.locator("#found .sq-table").last).to_be_visible()
            if tab == "Generate":
                part = page.get_by_role("button", name="LoRA", exact=True)  # without its arrow
                expect(part).to_have_attribute("aria-expanded", "false")
            if tab == "Convert":
                expect(page.get_by_role("group", name="Write")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert looks.faint(page) == []
            assert looks.nameless(page) == []
            assert looks.misleading(page) == []
            box = page.locator(".gradio-container").first.bounding_box() or {}
            widths.add((box["x"], box["width"]))
            page.screenshot(path=tmp_path / f"{tab.lower()}-{width}-{scheme}.png", full_page=True)
        assert len(widths) == 1  # the page stands still
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        dark = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) < 200
        assert dark == (scheme == "dark")

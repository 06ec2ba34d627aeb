"""Take docs/settings.png: the settings page of a running `sdquant ui`, with a choice that works beside one that cannot.

    python tools/screenshot.py

Needs chromium on the path, and the test extra.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
WIDTH, HEIGHT, CUT = 1180, 850, 390  # of the whole page, and of its part that changes
GAP = 16


def main() -> None:
    """Start the page, look at it twice, and put the pictures together."""
    from tests.browser.conftest import CHROMIUM, FLAGS
    from tests.browser.person import Person
    from tests.ui.conftest import start

    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        served = start(home / "served", "--no-browser", "--settings", str(home / "none.json"), module=("sdquant", "ui"))
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
                page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
                person = Person(page, served.url)
                person.tab("Settings")
                shots = []
                for scheme, verdict in (("nf4", "works"), ("qint8", "breaks")):
                    person.set("quant.model", scheme)
                    person.set("quant.text_encoder", scheme)
                    person.set("offload", "balanced")
                    expect(page.locator(f"#verdict .sq-{verdict}")).to_be_visible()
                    expect(page.locator(f"#schemes tr.sq-chosen[data-scheme={scheme}]").first).to_be_visible()
                    expect(page.locator("#schemes")).not_to_contain_text("computing")  # the speeds come later
                    page.mouse.move(0, 0)  # over no button
                    page.evaluate("scrollTo(0, 0)")
                    page.screenshot(path=home / f"{scheme}.png", full_page=True)
                    shots.append(Image.open(home / f"{scheme}.png").convert("RGB"))
                top = int((page.locator("#set-quant-model").bounding_box() or {"y": 0})["y"])
                browser.close()
            sheet = Image.new("RGB", (WIDTH, HEIGHT + GAP + CUT), "white")
            sheet.paste(shots[0].crop((0, 0, WIDTH, HEIGHT)), (0, 0))
            sheet.paste(shots[1].crop((0, top, WIDTH, top + CUT)), (0, HEIGHT + GAP))
            sheet.save(ROOT / "docs" / "settings.png", optimize=True)
        finally:
            served.end()


if __name__ == "__main__":
    main()

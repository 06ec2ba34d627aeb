"""Chromium, and the page of a running `sdquant ui`.

Playwright keeps an event loop running in the thread of the tests. It ends with this package: others start their own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from ..patience import PATIENCE
from ..ui.conftest import Served, serve
from .person import Person

__all__ = ["serve"]

expect.set_options(timeout=1000 * PATIENCE)  # ms; the machine may be busy, and models load

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """The browser. Where there is none the tests are skipped, but for CI, which sets SDQUANT_NEEDS_BROWSER."""
    if CHROMIUM is None:
        if os.environ.get("SDQUANT_NEEDS_BROWSER"):
            pytest.fail("SDQUANT_NEEDS_BROWSER is set, and there is no chromium on the path")
        pytest.skip("there is no chromium on the path; Debian has it as the package chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def running(serve: object, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A server with the real page, its settings in a file of its own."""
    return run(serve, tmp_path_factory.mktemp("settings") / "settings.json")


def run(serve: object, settings: Path, *more: str) -> Served:
    """Start `sdquant ui` with a settings file, and more arguments."""
    assert callable(serve)
    served = serve("--no-browser", "--settings", str(settings), *more, module=("sdquant", "ui"))
    assert isinstance(served, Served)
    return served


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A new page. What it asks for elsewhere than at the server, and errors of its own, fail the test."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    page = context.new_page()
    wrong: list[str] = []

    def asked(request: Request) -> None:
        if "//127.0.0.1:" not in request.url and not request.url.startswith(("data:", "blob:")):
            wrong.append(request.url)

    page.on("request", asked)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    context.close()
    assert wrong == []


@pytest.fixture
def person(page: Page, running: Served) -> Person:
    """Somebody who has just opened the page."""
    return Person(page, running.url)

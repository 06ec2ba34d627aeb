"""The stand-ins of the web UIs as the process that a test runs in: `modules` is theirs, and gone after the test."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdquant.hosts import extension

HERE = Path(__file__).parent
FOLDERS = {"sdnext": ["sdnext"], "a1111": ["a1111", "classic"], "forge": ["forge", "classic"]}
_THEIRS = ("modules", "modules_forge", "backend")


class Running:
    """A host with the extension registered.

    Attributes:
        modules: its modules by name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        names = ("shared", "script_callbacks", "errors", "sd_models", "paths")
        self.modules = SimpleNamespace(**{word: importlib.import_module(f"modules.{word}") for word in names})

    def start(self, settings: dict[str, Any] | None = None, stored: dict[str, Any] | None = None) -> None:
        """Run the extension's script, have the host ask for settings, and set some.

        Args:
            stored: what the host's config had before.
        """
        self.modules.shared.opts.data.update(stored or {})
        script = Path(extension.__file__).parent / "webui" / "scripts" / "sdquant_ext.py"
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "sdquant_ext.py"})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what gradio says while it is imported
            self.modules.script_callbacks.ui_settings_callback()
        for name, value in (settings or {}).items():
            self.modules.shared.opts.set(name, value)

    @property
    def status(self) -> dict[str, Any]:
        """What the REST route answers."""
        return extension._answer()

    @property
    def shown(self) -> list[str]:
        """The texts of the errors that the host has shown."""
        return [str(error) for _, error in self.modules.errors.shown]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Running]]:
    """host("sdnext" | "forge" | "a1111"): this process as that web UI."""

    def be(name: str) -> Running:
        for folder in reversed(FOLDERS[name]):
            monkeypatch.syspath_prepend(HERE / folder)
        return Running(name)

    _forget()
    yield be
    if extension._session is not None:
        extension._session.unload()
        extension._session = None
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in _THEIRS]:
        del sys.modules[name]
    importlib.invalidate_caches()

"""The stand-ins of the web UIs as the process that a test runs in: their modules are there, and gone after the test."""

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
FOLDERS = {
    "sdnext": ["sdnext"], "a1111": ["a1111", "a1111/Lora", "classic"], "forge": ["forge", "classic"],
    "neo": ["neo", "patcher", "forge", "classic"], "reforge": ["reforge", "patcher", "classic"],
}  # fmt: skip
_THEIRS = (
    "modules", "modules_forge", "backend", "ldm_patched", "network", "networks", "ported_lora", "ported_patcher"
)  # fmt: skip


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
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "sdquant_ext.py", "__file__": str(script)})
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
    """host("sdnext" | "forge" | "neo" | "reforge" | "a1111"): this process as that web UI."""

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


@pytest.fixture
def comfy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """ComfyUI's stand-in, empty folders: `.models`, `.encoders`, `.output`, `.folder_paths`, `.nodes`, `.comfy`."""
    from sdquant.hosts import comfy_ops, comfy_patcher

    names = [name for name in sys.modules if name.partition(".")[0] in ("comfy", "folder_paths")]
    assert not names
    monkeypatch.syspath_prepend(str(HERE / "comfy_standin"))
    folder_paths = importlib.import_module("folder_paths")
    models, output = tmp_path / "models", tmp_path / "output"
    encoders = tmp_path / "text_encoders"
    for folder in (models, output, encoders):
        folder.mkdir()
    folder_paths.folder_names_and_paths["diffusion_models"] = ([str(models), str(output / "diffusion_models")], set())
    folder_paths.folder_names_and_paths["text_encoders"] = ([str(encoders)], set())
    folder_paths.output_directory = str(output)
    for cached in (comfy_ops.operations, comfy_patcher.patcher_class):
        cached.cache_clear()
    importlib.import_module("comfy.sd")
    found = importlib.import_module("comfy")
    nodes = importlib.import_module("sdquant.hosts.comfyui")
    yield SimpleNamespace(
        models=models, encoders=encoders, output=output, folder_paths=folder_paths, nodes=nodes, comfy=found
    )
    for name in [name for name in sys.modules if name.partition(".")[0] in ("comfy", "comfy_api", "folder_paths")]:
        del sys.modules[name]
    sys.modules.pop("sdquant.hosts.comfyui", None)

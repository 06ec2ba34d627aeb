"""The hosts' stand-ins, one at a time, as the modules that a host's own Python has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def comfy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The stand-in for ComfyUI with empty folders: `.models`, `.output`, `.folder_paths`, `.nodes` and `.comfy`."""
    from sdquant.hosts import comfy_ops, comfy_patcher

    names = [name for name in sys.modules if name.partition(".")[0] in ("comfy", "folder_paths")]
    assert not names
    monkeypatch.syspath_prepend(str(HERE / "comfy_standin"))
    folder_paths = importlib.import_module("folder_paths")
    models, output = tmp_path / "models", tmp_path / "output"
    models.mkdir()
    output.mkdir()
    folder_paths.folder_names_and_paths["diffusion_models"] = ([str(models), str(output / "diffusion_models")], set())
    folder_paths.output_directory = str(output)
    for cached in (comfy_ops.operations, comfy_patcher.patcher_class):
        cached.cache_clear()
    importlib.import_module("comfy.sd")
    found = importlib.import_module("comfy")
    nodes = importlib.import_module("sdquant.hosts.comfyui")
    nodes.register_folder()
    yield SimpleNamespace(models=models, output=output, folder_paths=folder_paths, nodes=nodes, comfy=found)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("comfy", "folder_paths")]:
        del sys.modules[name]
    sys.modules.pop("sdquant.hosts.comfyui", None)

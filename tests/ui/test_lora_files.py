"""LoRA files that are dropped into the page: put where they are found again, or refused; their folder is remembered."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdquant.errors import SdquantError
from sdquant.ui.lora_files import take_lora
from sdquant.ui.model_folders import Roots
from sdquant.ui.page_memory import LORA_FOLDER, PageMemory


def _lora(path: Path, value: float = 1.0) -> Path:
    save_file({f"lora_unet_a.lora_{end}.weight": torch.full((2, 2), value) for end in ("up", "down")}, path)
    return path


def test_dropped_files(tmp_path: Path) -> None:
    models, dropped = tmp_path / "models", tmp_path / "dropped"
    for folder in (models, models / "mine", dropped):
        folder.mkdir()
    _lora(models / "mine" / "other.safetensors")
    roots = Roots([models])
    ink = _lora(dropped / "ink (v2).safetensors")
    assert take_lora(roots, "", ink) == "models/loras/ink (v2).safetensors"
    assert take_lora(roots, "", ink) == "models/loras/ink (v2).safetensors"  # again: it is there
    assert take_lora(roots, "models/mine", ink) == "models/mine/ink (v2).safetensors"
    assert roots.lora_folders() == ["models/loras", "models/mine"]
    _lora(ink, 2.0)
    wrong = [(roots, "", ink, "another ink"), (Roots(), "", ink, "no folder"), (roots, "../x", ink, "not the name")]
    save_file({"a": torch.ones(1)}, dropped / "model.safetensors")
    (dropped / "lora.pt").write_bytes(b"x")
    wrong += [
        (roots, "", dropped / "model.safetensors", "holds no LoRA"), (roots, "", dropped / "lora.pt", "can run code"),
        (roots, "", _lora(dropped / "con.safetensors"), "not every system"),
    ]  # fmt: skip
    for where, folder, file, why in wrong:
        with pytest.raises(SdquantError, match=why):
            take_lora(where, folder, file)
    assert not list(models.rglob("*.part"))


def test_a_dropped_file_goes_from_where_the_page_put_it_and_the_rest_is_said(tmp_path: Path) -> None:
    from sdquant.ui.app_state import Desk
    from sdquant.ui.tabs.lora_picker import ALL, _added

    models = tmp_path / "models"
    models.mkdir()
    desk = Desk(Roots([models]), tmp_path / "settings.json")
    ink = _lora(tmp_path / "ink.safetensors")
    told = _added(desk, str(ink), "", ALL, [None])
    assert "Added" in told[1] and (models / "loras" / "ink.safetensors").exists() and not ink.exists()
    shutil.rmtree(models / "loras")
    (models / "loras").write_text("")  # so that no folder can be made there
    ink = _lora(tmp_path / "ink.safetensors")
    assert "Cannot write" in _added(desk, str(ink), "", ALL, [None])[1] and not ink.exists()


def test_what_the_page_remembers(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    memory = PageMemory(settings)
    memory.keep(LORA_FOLDER, "models/loras")
    assert PageMemory(settings).get(LORA_FOLDER) == "models/loras"
    for damaged in ("[1]", "{", '{"lora_folder": 5}'):
        (tmp_path / "settings-page.json").write_text(damaged)
        assert PageMemory(settings).get(LORA_FOLDER) == ""
    PageMemory(tmp_path / "settings.json" / "not a folder" / "x.json").keep(LORA_FOLDER, "a")


def test_two_files_of_one_name_at_once(tmp_path: Path) -> None:
    """One is taken, and the other refused: it replaces nothing."""
    models = tmp_path / "models"
    models.mkdir()
    files = []
    for n in range(4):
        (tmp_path / str(n)).mkdir()
        files.append(_lora(tmp_path / str(n) / "ink.safetensors", float(n)))

    def take(file: Path) -> bytes | None:
        try:
            take_lora(Roots([models]), "", file)
        except SdquantError:
            return None
        return file.read_bytes()

    with ThreadPoolExecutor(len(files)) as pool:
        taken = [one for one in pool.map(take, files) if one is not None]
    assert taken == [(models / "loras" / "ink.safetensors").read_bytes()]

"""The settings file as the page finds it, and what goes with a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdquant.settings import Settings
from sdquant.settings import file as settings_file
from sdquant.ui.app_state import Desk
from sdquant.ui.model_folders import Roots
from sdquant.ui.plan_preview import Target

BALANCED = Settings({"offload": "balanced"})


@pytest.mark.parametrize("content", ["{", '{"format": "sdquant-settings", "version": 99, "settings": {}}', "\0"])
def test_a_damaged_file_is_set_aside(content: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(content)
    desk = Desk(Roots(), path)
    assert desk.settings == Settings() and (tmp_path / "settings.json.broken-1").read_text() == content
    assert "kept as settings.json.broken-1" in desk.notes and str(tmp_path) not in desk.notes
    assert desk.keep(BALANCED) is None and settings_file.load(path) == BALANCED


def test_a_folder_in_its_place_stays_there(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.mkdir()
    (path / "of-the-user").touch()
    desk = Desk(Roots(), path)
    assert "it is a folder. All settings are at their defaults now, and changes cannot be saved" in desk.notes
    lost = desk.keep(BALANCED)
    assert lost is not None and desk.settings == BALANCED
    assert [child.name for child in tmp_path.iterdir()] == ["settings.json"] and (path / "of-the-user").exists()


def test_a_file_that_cannot_be_renamed_does_not_keep_the_page_shut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    path.write_text("{")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.rename", refuse)  # the fault: a folder that may not be written
    assert "cannot be set aside: Permission denied" in Desk(Roots(), path).notes
    assert path.read_text() == "{"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    desk = Desk(Roots(), tmp_path / "file" / "settings.json")
    lost = desk.keep(BALANCED)
    assert lost is not None and lost.why and desk.settings == BALANCED


def test_the_base_that_a_lone_component_is_lent_by(tmp_path: Path) -> None:
    """The first pipeline that has a place for it, not the first of all."""
    desk = Desk(Roots(), tmp_path / "settings.json")
    assert desk.bases()[:2] == ["digits-flux", "digits-sd"]
    names = [entry.name for entry in desk.roots.files()]
    assert "digits-sd/unet" in names
    assert desk.base_for("digits-sd/unet") == "digits-sd"
    assert desk.base_for("digits-flux/transformer") == "digits-flux"


def test_a_part_that_is_written_anew_changes_the_stamp(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("flux.gguf", "t5.gguf")]
    for file in files:
        file.write_bytes(b"1")
    target = Target(path=str(files[0]), parts=(str(files[1]),))
    before = Desk.stamp(target)
    assert Desk.stamp(target) == before
    files[1].write_bytes(b"22")
    assert Desk.stamp(target) != before

"""`sdquant install-extension`: into which folders, over what, and out again; and the check that the host runs."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdquant import SettingsError, cli, hosts
from sdquant.hosts.host import PLACES, HostProgram, in_folder
from sdquant.utils.install import install_alone

from .conftest import HERE

Capture = pytest.CaptureFixture[str]
FILES = {
    "webui": ["install.py", "metadata.ini", "scripts/sdquant_ext.py"],
    "comfyui": ["__init__.py", "metadata.ini"],
}
# What the stand-ins have of a web UI's folder.
FOLDERS = {
    "sdnext": ["sdnext"], "forge": ["forge", "classic"], "neo": ["neo", "forge", "classic"],
    "a1111": ["a1111", "classic"], "comfyui": ["comfy_standin"],
}  # fmt: skip


def _row(webui: Path) -> HostProgram:
    return next(row for row in PLACES if row.name == webui.name)


@pytest.fixture(params=FOLDERS)
def webui(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a web UI, with another extension in it."""
    folder = tmp_path / request.param
    for part in FOLDERS[request.param]:
        shutil.copytree(HERE / part, folder, dirs_exist_ok=True)
    if request.param == "comfyui":
        for name in ("main.py", "nodes.py"):
            (folder / name).write_text("")
    (folder / _row(folder).into).with_name("other").mkdir(parents=True)
    return folder


def _run(capsys: Capture, *args: object) -> dict[str, Any]:
    cli.main(["install-extension", *map(str, args), "--json"])
    answer = json.loads(capsys.readouterr().out)
    return answer.get("error", answer)


def test_installed_again_and_removed(webui: Path, capsys: Capture) -> None:
    target = webui / _row(webui).into
    assert _run(capsys, webui)["host"] == webui.name
    assert sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()) == FILES[_row(webui).source]
    assert "--overwrite" in _run(capsys, webui)["fix"]
    (target / "old.py").write_text("")
    assert _run(capsys, webui, "--overwrite")["done"] == "installed"
    assert not (target / "old.py").exists()
    assert _run(capsys, webui, "--remove")["done"] == "removed"
    assert [path.name for path in target.parent.iterdir()] == ["other"]
    assert _run(capsys, webui, "--remove")["why"] == "it does not exist"


def test_the_web_ui_is_named_and_what_comes_next(webui: Path, capsys: Capture) -> None:
    assert cli.main(["install-extension", str(webui)]) == 0
    row = _row(webui)
    out = capsys.readouterr().out
    assert out.startswith(f"{row.title}: installed ")
    assert install_alone("<its Python>") in out
    for text in (row.then, *row.cannot):
        assert text in out


def test_its_own_python_is_named_where_it_has_one(webui: Path, capsys: Capture) -> None:
    python = webui / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    assert install_alone(f'"{python}"') in _run(capsys, webui)["next"][0]
    assert _run(capsys, webui, "--remove")["next"] == [f"Start {_row(webui).title} again"]


def test_a_copy_that_fails_leaves_the_old_one(webui: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    target = webui / _row(webui).into
    _run(capsys, webui)
    (target / "old.py").write_text("")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    assert _run(capsys, webui, "--overwrite")["kind"] == "DiskSpaceError"
    assert (target / "old.py").exists()
    assert sorted(path.name for path in target.parent.iterdir()) == ["other", "sdquant"]


def test_each_is_told_from_all_others(webui: Path) -> None:
    assert in_folder(webui).name == webui.name
    (webui / _row(webui).files[-1]).unlink()
    with pytest.raises(SettingsError, match=r"contains none of SD\.Next, Forge Neo, Forge, AUTOMATIC1111 and ComfyUI"):
        in_folder(webui)


@pytest.mark.parametrize("there", ["link", "folder", "named", "garbled", "file"])
def test_anothers_extension_stays(webui: Path, capsys: Capture, there: str) -> None:
    target = webui / _row(webui).into
    if there == "link":
        target.symlink_to(target.with_name("other"))
    elif there == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine.txt").write_text("mine")
        if there == "named":
            (target / "metadata.ini").write_text("[Extension]\nName = other\n")
        if there == "garbled":
            (target / "metadata.ini").write_bytes(b"\xff\xfe[")
    for flag in ("--overwrite", "--remove"):
        assert _run(capsys, webui, flag)["kind"] == "ConflictError"
    assert target.exists()
    assert there in ("link", "file") or (target / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_a_folder_that_is_no_web_ui_is_refused(tmp_path: Path, capsys: Capture, kind: str) -> None:
    folder = tmp_path / "it"
    if kind == "empty":
        folder.mkdir()
    if kind == "file":
        folder.write_text("")
    error = _run(capsys, folder)
    assert error["kind"] == "SettingsError"
    assert error["fix"] == "Name the folder that contains webui.py, or for ComfyUI main.py"
    assert kind == "missing" or not folder.is_dir() or not any(folder.iterdir())


def test_the_hosts_check_says_what_is_missing_and_installs_nothing(tmp_path: Path) -> None:
    check = tmp_path / "install.py"
    shutil.copy(Path(hosts.__file__).parent / "webui" / "install.py", check)
    here = str(Path(hosts.__file__).parents[2])
    for path, said in ((here, ""), ("", install_alone(sys.executable))):
        out = subprocess.run(
            [sys.executable, "-S", str(check)], cwd=tmp_path, env={"PYTHONPATH": path}, capture_output=True, text=True
        )
        assert out.returncode == 0, out.stderr
        assert said in out.stdout
        assert bool(said) == bool(out.stdout)

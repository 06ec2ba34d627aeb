"""`sdquant install-extension`: into which folders, over what, and out again; and the check that the host runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sdquant import cli, hosts
from sdquant.hosts.host import HOSTS

from .conftest import HERE

Capture = pytest.CaptureFixture[str]
FILES = ["install.py", "metadata.ini", "scripts/sdquant_ext.py"]


@pytest.fixture(params=[row.name for row in HOSTS])
def webui(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a web UI."""
    folder = tmp_path / request.param
    shutil.copytree(HERE / request.param, folder)
    if request.param != "sdnext":
        shutil.copytree(HERE / "classic", folder, dirs_exist_ok=True)
    (folder / "extensions" / "other").mkdir(parents=True)
    return folder


def _run(capsys: Capture, *args: object) -> dict[str, str]:
    cli.main(["install-extension", *map(str, args), "--json"])
    answer = json.loads(capsys.readouterr().out)
    return answer.get("error", answer)


def test_installed_again_and_removed(webui: Path, capsys: Capture) -> None:
    target = webui / "extensions" / "sdquant"
    assert _run(capsys, webui)["host"] == webui.name
    assert sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()) == FILES
    assert "--overwrite" in _run(capsys, webui)["fix"]
    (target / "old.py").write_text("")
    assert _run(capsys, webui, "--overwrite")["done"] == "installed"
    assert not (target / "old.py").exists()
    assert _run(capsys, webui, "--remove")["done"] == "removed"
    assert [path.name for path in (webui / "extensions").iterdir()] == ["other"]
    assert _run(capsys, webui, "--remove")["why"] == "it is not there"


def test_the_web_ui_is_named(webui: Path, capsys: Capture) -> None:
    assert cli.main(["install-extension", str(webui)]) == 0
    row = next(row for row in HOSTS if row.name == webui.name)
    out = capsys.readouterr().out
    assert out.startswith(f"{row.title}: installed ")
    assert row.cannot[0] in out


@pytest.mark.parametrize("there", ["link", "folder", "named", "garbled", "file"])
def test_anothers_extension_stays(webui: Path, capsys: Capture, there: str) -> None:
    target = webui / "extensions" / "sdquant"
    if there == "link":
        target.symlink_to(webui / "extensions" / "other")
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
    assert (error["kind"], error["fix"]) == ("SettingsError", "Name the folder that webui.py is in")
    assert not (folder / "extensions").exists()


def test_the_hosts_check_says_what_is_missing_and_installs_nothing(tmp_path: Path) -> None:
    check = tmp_path / "install.py"
    shutil.copy(Path(hosts.__file__).parent / "webui" / "install.py", check)
    here = str(Path(hosts.__file__).parents[2])
    for path, said in ((here, ""), ("", "pip install sdquant")):
        out = subprocess.run(
            [sys.executable, "-S", str(check)], cwd=tmp_path, env={"PYTHONPATH": path}, capture_output=True, text=True
        )
        assert out.returncode == 0, out.stderr
        assert said in out.stdout
        assert bool(said) == bool(out.stdout)

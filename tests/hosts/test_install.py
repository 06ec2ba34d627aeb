"""`sdquant install-extension`: into which folders, over what, and out again; and the check that the host runs."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sdquant import SettingsError, cli, hosts
from sdquant.hosts import bundle, preflight
from sdquant.hosts.host import PLACES, HostProgram, in_folder
from sdquant.utils.install import install_alone, spaced
from tools.hosts import comfy_workflows

from .conftest import HERE

Capture = pytest.CaptureFixture[str]
FILES = {
    "webui": ["install.py", "metadata.ini", "scripts/sdquant_ext.py"],
    "comfyui": [
        "__init__.py",
        *(f"example_workflows/{path.name}" for path in comfy_workflows.written()),
        "metadata.ini",
        "pyproject.toml",
        "web/show_text.js",
    ],
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
    assert sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()) == sorted(
        FILES[_row(webui).source]
    )
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
    with pytest.raises(
        SettingsError, match=r"contains none of SD\.Next, Forge Neo, Forge, reForge, AUTOMATIC1111 and ComfyUI"
    ):
        in_folder(webui)


def test_a_fork_that_loads_otherwise_is_refused_by_name(tmp_path: Path, capsys: Capture) -> None:
    """Forge Classic 1f95d717: sd_models imports the module modules_forge/forge_loader.py."""
    folder = tmp_path / "classic"
    shutil.copytree(HERE / "classic", folder)
    (folder / "modules_forge").mkdir()
    for file in ("webui.py", "modules/sd_models.py", "modules_forge/forge_loader.py"):
        (folder / file).write_text("")
    error = _run(capsys, folder)
    assert error["what"] == "Cannot use sdquant in Forge Classic or a Forge of before August 2024"
    assert not (folder / "extensions").exists()


def test_an_old_torch_is_told_before_the_first_start_and_after(webui: Path, capsys: Capture) -> None:
    launcher = "torch_command = os.environ.get('TORCH_COMMAND', f\"pip install torch==2.3.1 torchvision==0.18.1\")"
    (webui / "modules").mkdir(exist_ok=True)
    (webui / "modules" / "launch_utils.py").write_text(launcher)
    assert "installs torch 2.3.1, and sdquant needs 2.6 or newer" in _run(capsys, webui)["warning"]
    packages = webui / "venv" / "lib" / "python3.10" / "site-packages"
    for name, version in (
        ("torch", "2.6.0"),
        ("Safetensors", "1"),
        ("psutil", "1"),
        ("filelock", "1"),
        ("PyYAML", "1"),
    ):
        (packages / f"{name}-{version}.dist-info").mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    warning = _run(capsys, webui, "--overwrite")["warning"]
    assert "packaging and tqdm are not installed in the web UI's Python. Run: " in warning
    assert cli.main(["install-extension", str(webui), "--overwrite"]) == 0
    assert f"It will not run yet. {warning}" in capsys.readouterr().out


def test_what_the_portable_pythons_have_is_not_bundled(tmp_path: Path) -> None:
    """It lies beside ComfyUI's and Forge's folders; and a package's name has several spellings."""
    packages = tmp_path / "python_embeded" / "Lib" / "site-packages"
    for name in (*preflight.PACKAGES, "huggingface_hub", "ninja"):
        (packages / f"{name}-3.dist-info").mkdir(parents=True)
        (packages / f"{name}-3.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 3\n")
    (tmp_path / "ComfyUI").mkdir()
    found = preflight.site_packages(tmp_path / "ComfyUI")
    assert found is not None and found.resolve() == packages.resolve()
    assert bundle.needed(("quanto",), preflight.in_folder(found)) == ["optimum-quanto>=0.2.7"]
    # Of an environment that is not found, nothing is known: all is brought, and what is there is preferred.
    assert bundle.needed(("quanto",), None) == [
        *preflight.PACKAGES,
        "optimum-quanto>=0.2.7",
        "ninja",
        "huggingface_hub",
    ]


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
    old = tmp_path / "packages" / "torch-2.1.2.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.2\n")
    newer = "the web UI has torch 2.1.2, and sdquant needs 2.6 or newer. Set the variable TORCH_COMMAND"
    packages = Path(torch.__file__).parents[1]
    for path, said in (
        (f"{here}{os.pathsep}{packages}", ""),
        (f"{here}{os.pathsep}{old.parent}", newer),
        (here, "torch, safetensors, psutil, packaging, filelock, pyyaml and tqdm are not installed"),
        ("", install_alone(f'"{sys.executable}"')),
    ):
        out = subprocess.run(
            [sys.executable, "-S", str(check)], cwd="/", env={"PYTHONPATH": path}, capture_output=True, text=True
        )
        assert out.returncode == 0, out.stderr
        assert said in out.stdout
        assert bool(said) == bool(out.stdout)


def test_the_oldest_versions_are_those_of_the_project() -> None:
    project = (Path(hosts.__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={preflight.TORCH}"' in project
    assert f'requires-python = ">={".".join(map(str, preflight.PYTHON))}"' in project
    assert all(f'"{name}>=' in project for name in preflight.PACKAGES)


BUNDLED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("it", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
import sdquant, pathlib
print(pathlib.Path(sdquant.__file__).parent)
from sdquant.utils import install
print(install.install_packages("sentencepiece"))
import spare
"""


def test_a_bundle_runs_in_a_python_without_sdquant(
    webui: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the web UI lacks is put beside it; the stand-in for pip writes a package where it is told to."""
    python = webui / "venv" / "bin" / "python"
    packages = webui / "venv" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    for folder in (python.parent, packages):
        folder.mkdir(parents=True)
    pip = 'import sys, pathlib as p; d = p.Path(sys.argv[sys.argv.index("--target") + 1]); d.mkdir(parents=True);'
    pip += ' (d / "spare.py").write_text(""); (d / "asked").write_text(" ".join(sys.argv))'
    python.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c '{pip}' \"$@\"\n")
    python.chmod(0o755)
    for name in ("torch", "safetensors", "psutil", "packaging", "filelock", "tqdm"):
        (packages / f"{name}-3.dist-info").mkdir()
        (packages / f"{name}-3.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 3\n")
    target = webui / _row(webui).into
    answer = _run(capsys, webui, "--bundle", "quanto")
    assert not any("pip install" in step for step in answer["next"])
    asked = (target / "bundle" / "packages" / "asked").read_text()
    assert asked.endswith("pyyaml optimum-quanto>=0.2.7 ninja huggingface_hub")
    script = target / ("__init__.py" if webui.name == "comfyui" else "install.py")
    if webui.name == "comfyui":  # whose own modules the nodes import
        script.write_text(script.read_text(encoding="utf-8").partition("from sdquant.hosts import comfy_paths")[0])
    out = subprocess.run(
        [sys.executable, "-c", BUNDLED, str(script)], cwd="/", env={}, capture_output=True, text=True, check=True
    )
    *_, where, advice = out.stdout.splitlines()
    assert Path(where) == target / "bundle" / "code" / "sdquant"
    command = f"{spaced(sys.executable)} -m pip install --no-deps --target {target / 'bundle' / 'packages'}"
    assert advice == f"{command} sentencepiece"
    assert _run(capsys, webui, "--overwrite", "--bundle", "quant")["why"].startswith("the extras for web UIs are bnb, ")
    assert target.exists()
    assert _run(capsys, webui, "--remove")["done"] == "removed" and not target.exists()


@pytest.mark.parametrize(("python", "said"), [(None, "has no Python in its folder"), ("exit 1", "it ended with 1")])
def test_a_bundle_that_cannot_be_made_leaves_no_extension(
    webui: Path, capsys: Capture, python: str | None, said: str
) -> None:
    if python is not None:
        (webui / "venv" / "bin").mkdir(parents=True)
        (webui / "venv" / "bin" / "python").write_text(f"#!/bin/sh\n{python}\n")
        (webui / "venv" / "bin" / "python").chmod(0o755)
    assert said in _run(capsys, webui, "--bundle", "bnb")["why"]
    assert not (webui / _row(webui).into).exists()

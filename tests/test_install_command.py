"""How texts say to install sdquant: in one way, from a checkout while no package index has it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sdquant import cli
from sdquant.compat import requirements
from sdquant.core import registry
from sdquant.hosts import host, preflight
from sdquant.utils import install

ROOT = Path(__file__).parents[1]
# Read before sdquant can be imported; `install-extension` writes into their copies what the constant says.
COPIED = {ROOT / "sdquant/hosts/webui/install.py", ROOT / "sdquant/hosts/comfyui/__init__.py"}
TEXTS = [path for folder in ("sdquant", "docs") for kind in ("py", "md") for path in (ROOT / folder).rglob(f"*.{kind}")]


def test_no_text_names_a_package_that_no_index_has() -> None:
    named = re.compile(r"pip install [^\n]*?(?<![\w./])sdquant\b(?!-)")
    assert [path for path in (ROOT / "README.md", *TEXTS) if named.search(path.read_text(encoding="utf-8"))] == []


def test_the_commands_are_in_one_place() -> None:
    """Those of extras and of web UIs; what is run in a checkout's own folder needs no name."""
    own = ROOT / "sdquant" / "utils" / "install.py"
    naming = {path for path in TEXTS if path.suffix == ".py" and install.CHECKOUT in path.read_text(encoding="utf-8")}
    assert naming == COPIED | {own}
    assert install.install_extra("gguf") == 'pip install "PATH/TO/SDQUANT[gguf]"'
    for page, command in (
        ("README.md", install.install_extra("gguf")),
        ("docs/web-uis.md", install.install_alone("python")),
    ):
        assert command in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("program", [host.PLACES[0], host.COMFYUI], ids=lambda row: row.name)
def test_all_texts_change_with_one_constant(
    program: host.HostProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "SOURCE", "sdquant")
    assert requirements.pip_line(registry.scheme("int8").codec) == 'pip install "sdquant[nncf]"'
    for name in program.files:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    assert cli.main(["install-extension", str(tmp_path)]) == 0
    copies = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / program.into).rglob("*.py"))
    assert install.install_alone("-").removeprefix("- -m ") in copies and install.CHECKOUT not in copies


def test_advice_in_a_web_ui_names_its_python_and_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = requirements.pip_line(registry.scheme("qint8").codec)
    assert needed == 'pip install "PATH/TO/SDQUANT[quanto]"'
    monkeypatch.setattr(install.sys, "executable", "/the web UI/venv/bin/python")
    monkeypatch.setattr(install, "_is_installed", lambda name: name != "ninja")
    for prefix, file in (("venv", "webui.py"), ("venv", "comfy/sd.py"), ("python_embeded", "ComfyUI/comfy/sd.py")):
        home = tmp_path / file.replace("/", "-")
        (home / file).parent.mkdir(parents=True)
        (home / file).write_text("")
        monkeypatch.setattr(install.sys, "prefix", str(home / prefix))
        line = '"/the web UI/venv/bin/python" -m pip install --no-deps'
        assert requirements.pip_line(registry.scheme("qint8").codec) == f'{line} "optimum-quanto>=0.2.7" ninja'
        assert install.install_packages("sentencepiece") == f"{line} sentencepiece"


def test_the_packages_of_extras_are_those_of_the_project() -> None:
    """And what they need in turn is listed, but for what a web UI has in any case."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert {name: tuple(extras[name]) for name in install.EXTRAS} == install.EXTRAS
    there = {"torch", "numpy", "huggingface-hub", "transformers", "diffusers", "accelerate", *preflight.PACKAGES}
    for rows in (*install.EXTRAS.values(), ("peft",)):
        for row in rows:
            name = Requirement(row).name
            listed = {canonicalize_name(one) for one in install.NEEDS.get(name, ())}
            assert _needs(name, there) <= listed | there, name


def _needs(name: str, stop: set[str]) -> set[str]:
    found: set[str] = set()
    for row in metadata.requires(name) or []:
        needed = Requirement(row)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            found.add(canonicalize_name(needed.name))
    return found.union(*(_needs(one, stop) for one in found - stop if one in EXPANDED))


EXPANDED = {"pydot", "rich", "markdown-it-py", "scikit-learn", "python-dateutil"}

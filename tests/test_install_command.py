"""How texts say to install sdquant: in one way, from a checkout while no package index has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sdquant import cli
from sdquant.compat import requirements
from sdquant.core import registry
from sdquant.hosts import host
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

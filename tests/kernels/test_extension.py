"""The C extension: whether it is there, and what is said where it is not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import pytest

from sdquant.kernels import cpu

FOLDER = Path(cpu.__file__).parent


def test_files_that_comments_name_exist() -> None:
    package = FOLDER.parent.parent
    for source in (*FOLDER.glob("*.c"), *FOLDER.glob("*.h")):
        text = re.sub(r"^#include <.*|\bimmintrin\.h", "", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for name in re.findall(r"(?<![\w*./])[\w/]+\.(?:py|c|h)\b", text):
            assert any((place / name).exists() for place in (FOLDER, package, package.parent)), (source.name, name)


@pytest.mark.parametrize("text", [None, "no library"])
def test_one_that_cannot_be_loaded_is_told_from_none(tmp_path: Path, text: str | None) -> None:
    """Of another machine, say: silently slower is what nobody could explain."""
    package = tmp_path / "native"
    package.mkdir()
    shutil.copy(cpu.__file__, package / "__init__.py")
    if text is not None:
        (package / f"_kernels{EXTENSION_SUFFIXES[0]}").write_text(text)
    code = "import native; print(native.extension(), native.isa(), native.state()); native.extension()"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    if text is None:
        assert run.stdout.startswith("None None not built") and run.stderr == ""
    else:
        assert run.stdout.startswith("None None built, but cannot be loaded (")
        assert run.stderr.count("cannot be loaded") == 1 and "reinstall sdquant" in run.stderr


@pytest.mark.parametrize("version", [None, 0, cpu.VERSION + 1])
def test_one_of_other_sources_is_left_alone(
    version: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after `git pull` in a checkout: its functions take other arguments, and would raise TypeErrors, or worse."""
    stale = ModuleType("_kernels")
    if version is not None:
        vars(stale)["VERSION"] = version
    monkeypatch.setitem(sys.modules, f"{cpu.__name__}._kernels", stale)
    monkeypatch.delenv(cpu.SWITCH, raising=False)
    for cached in (cpu._built, cpu.extension):
        cached.cache_clear()
    try:
        assert cpu.extension() is None and cpu.extension() is None and cpu.isa() is None
        assert cpu.state().startswith("built of other sources") and "build_ext --inplace" in cpu.state()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "build_ext --inplace" in caplog.text
    finally:
        for cached in (cpu._built, cpu.extension):
            cached.cache_clear()


def test_the_numbers_are_one() -> None:
    assert re.search(rf"^#define VERSION {cpu.VERSION}$", (FOLDER / "module.c").read_text(), flags=re.MULTILINE)

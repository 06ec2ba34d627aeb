"""The C extension: whether it is there, and what is said where it is not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

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

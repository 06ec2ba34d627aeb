"""`python -m tools.release`: what it refuses to release."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from sdquant.utils.version import __version__
from tools import release

GOOD = ("sdquant/kernels/cpu/_kernels.abi3.so", "sdquant/hosts/webui/install.py")


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("sdquant-1-cp310-abi3-linux_x86_64.whl", GOOD, None),
        ("sdquant-1-cp311-cp311-linux_x86_64.whl", GOOD, "does not say cp310-abi3"),
        ("sdquant-1-cp310-abi3-linux_x86_64.whl", GOOD[1:], "has no C kernels"),
        ("sdquant-1-cp310-abi3-linux_x86_64.whl", GOOD[:1], "lacks the folders for web UIs"),
    ],
)
def test_a_wheel_is_looked_at(name: str, files: tuple[str, ...], said: str | None, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for file in files:
            wheel.writestr(file, "")
    why = release.wheel_problem(tmp_path / name)
    assert why is None if said is None else said in (why or "")


def test_the_version_is_one() -> None:
    assert release.version() == __version__

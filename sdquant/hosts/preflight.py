"""What a web UI's Python lacks for sdquant: asked before anything is imported that would fail.

Web UIs choose their own packages, and `pip install --no-deps` looks at none of them.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BackendUnavailableError
from ..utils import install

if TYPE_CHECKING:
    from .host import HostProgram

TORCH = "2.6"  # the oldest that sdquant runs with; pyproject.toml says the same
PYTHON = (3, 10)
# Distributions that are imported whatever is quantized, in any version that a web UI has.
PACKAGES = ("safetensors", "psutil", "packaging", "filelock", "pyyaml", "tqdm")

Versions = Callable[[str], "str | None"]  # of a distribution; None: it is not installed


def version_here(name: str) -> str | None:
    """Return the version of a distribution in this Python; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_packages(version_of: Versions | None = None, python: tuple[int, ...] = sys.version_info[:2]) -> None:
    """Check that sdquant runs with a Python and its packages; imports none of them.

    Raises:
        BackendUnavailableError: it does not; names all that is missing or too old.
    """
    version_of = version_of or version_here
    torch = version_of("torch")
    if python < PYTHON:
        have, need = (".".join(map(str, pair)) for pair in (python, PYTHON))
        raise _cannot(f"the web UI runs Python {have}, and sdquant needs {need} or newer", f"Use Python {need}")
    if torch is not None and is_older(torch, TORCH):
        raise _cannot(f"the web UI has torch {torch}, and sdquant needs {TORCH} or newer", new_torch())
    lacks = [name for name in ("torch", *PACKAGES) if version_of(name) is None]
    if lacks:
        are = "is" if len(lacks) == 1 else "are"
        names = " and ".join(filter(None, (", ".join(lacks[:-1]), lacks[-1])))
        first = "Start the web UI once, which installs it"
        fix = first if "torch" in lacks else f"Run: {install.install_beside(*lacks)}"
        raise _cannot(f"{names} {are} not installed in the web UI's Python", fix)


def new_torch() -> str:
    """Return how to get a newer torch in a web UI that was made for an older one."""
    return (
        "Set the variable TORCH_COMMAND in webui-user to the `pip install torch torchvision` that the selector on the "
        f"PyTorch site gives for your card, torch {TORCH} or newer, and start the web UI once with --reinstall-torch. "
        "Or leave the web UI as it is and use sdquant's own page: sdquant ui"
    )


def warning(folder: Path, webui: HostProgram, bundled: Path) -> str | None:
    """Return why sdquant cannot run in the web UI in `folder`, as one sentence; None if nothing speaks against it.

    Looks at the packages of its own environment, or, before its first start, at the torch that it will install.

    Args:
        bundled: the folder of packages that the extension brings; it need not exist.
    """
    try:
        environment = site_packages(folder)
        if environment is not None:
            theirs, ours = in_folder(environment), in_folder(bundled)
            require_packages(lambda name: theirs(name) or ours(name), python_of(environment))
        elif (torch := torch_to_come(folder)) is not None and is_older(torch, TORCH):
            why = f"{webui.title} installs torch {torch}, and sdquant needs {TORCH} or newer"
            raise _cannot(why, new_torch())
    except BackendUnavailableError as error:
        return str(error)
    return None


def site_packages(folder: Path) -> Path | None:
    """Return the packages of the environment in a web UI's folder; None if it has none there."""
    for name in ("venv", ".venv"):
        for place in (folder / name / "Lib" / "site-packages", *(folder / name).glob("lib/python3*/site-packages")):
            if place.is_dir():
                return place
    return None


def in_folder(place: Path) -> Versions:
    """Return what gives the versions of the distributions in a folder of packages."""
    versions = {
        re.sub(r"[-_.]+", "-", str(one.metadata["Name"] or "")).lower(): one.version
        for one in importlib.metadata.distributions(path=[str(place)])
    }
    return versions.get


def python_of(place: Path) -> tuple[int, ...]:
    """Return the version of the Python whose packages are in `place`: of the folder's name, else of pyvenv.cfg."""
    match = re.search(r"python(3)\.(\d+)", place.parent.name)
    config = next((one / "pyvenv.cfg" for one in place.parents[:3] if (one / "pyvenv.cfg").is_file()), None)
    if match is None and config is not None:
        match = re.search(r"^version(?:_info)?\s*=\s*(\d+)\.(\d+)", config.read_text(errors="replace"), re.MULTILINE)
    return (int(match[1]), int(match[2])) if match is not None else PYTHON


def torch_to_come(folder: Path) -> str | None:
    """Return the torch that the web UI's launcher installs at the first start; None if it names none."""
    launcher = folder / "modules" / "launch_utils.py"
    if not launcher.is_file():
        return None
    named = re.search(r"install torch==(\d[\w.+]*)", launcher.read_text(encoding="utf-8", errors="replace"))
    return named[1] if named is not None else None


def is_older(version: str, least: str) -> bool:
    """Return whether a version is older than another: by its numbers alone, since packaging may be missing."""
    return _numbers(version) < _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match is not None else (sys.maxsize,)


def _cannot(why: str, fix: str) -> BackendUnavailableError:
    return BackendUnavailableError("Cannot run sdquant in this web UI", why, fix)

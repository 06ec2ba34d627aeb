"""A copy of sdquant inside the extension's folder, for web UIs whose Python is to stay as it is.

`bundle/code` is put first on the web UI's path, by the extension's own files; `bundle/packages`, last, so that what the
web UI has is used: there lies what it lacks, and the packages of the extras that were asked for.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib import resources
from pathlib import Path

from ..errors import BackendUnavailableError, SettingsError
from ..utils import install
from . import preflight

FOLDER = "bundle"
_ENDS = 3  # lines of pip's that an error repeats


def add_bundle(
    extension: Path, extras: tuple[str, ...], python: Path | None, there: preflight.Versions | None
) -> list[str]:
    """Write the bundle into the folder of an extension.

    Args:
        python: the web UI's; None if it is not known. there: the versions of its packages; None if they are not known.

    Returns:
        The packages in it, beside sdquant.

    Raises:
        SettingsError: an unknown extra, or packages are needed and the web UI's Python is not known.
        BackendUnavailableError: pip did not install them.
    """
    packages = needed(extras, there) if python is not None or there is not None or extras else []
    if packages and python is None:
        raise SettingsError(
            f"Cannot bundle {' and '.join(packages)}",
            "the web UI has no Python in its folder, and packages have to be made for its version",
            "Start the web UI once, which makes its environment, or leave out the extras",
        )
    with resources.as_file(resources.files("sdquant")) as source:
        shutil.copytree(source, extension / FOLDER / "code" / "sdquant", ignore=shutil.ignore_patterns("__pycache__"))
    if packages:
        _download(packages, extension / FOLDER / "packages", python)
    return packages


def needed(extras: tuple[str, ...], there: preflight.Versions | None) -> list[str]:
    """Return the requirements of sdquant and of extras that a web UI lacks; all of them if it is not known what it has.

    What it has is found first, so that those which are there twice do no harm.

    Raises:
        SettingsError: an unknown extra.
    """
    for extra in extras:
        if extra not in install.EXTRAS:
            known = ", ".join(install.EXTRAS)
            raise SettingsError(f"Cannot bundle {extra!r}", f"the extras for web UIs are {known}", "Use one of them")
    extra_rows = tuple(dict.fromkeys(row for extra in extras for row in install.EXTRAS[extra]))
    lacks = [name for name in preflight.PACKAGES if there is None or there(name) is None]
    return lacks + install.with_needs(extra_rows, lambda name: there is not None and there(name) is not None)


def _download(requirements: list[str], folder: Path, python: Path | None) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *requirements]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        message = " ".join(run.stderr.strip().splitlines()[-_ENDS:]) or f"it ended with {run.returncode}"
        raise BackendUnavailableError(
            f"Cannot bundle {' and '.join(requirements)}",
            f"pip of the web UI's Python did not install them: {message}",
            "Check the connection, or leave out the extras",
        )

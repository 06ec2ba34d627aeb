"""Check that the package of a scheme is installed and new enough, and name the command that installs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core import registry
from ..errors import BackendUnavailableError
from ..utils.install import install_extra
from .row import in_range

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..core import Backend, Requirement, Scheme

# fp8 has a second packing, torch's own float8, which is used if bitsandbytes is missing.
PACKAGE_OPTIONAL = frozenset({"fp8"})
_NAMED = 3  # schemes in an error, those of the nearest number of bits


def problem(backend: Backend, versions: Mapping[str, str]) -> str | None:
    """Return why the backend cannot be used with the packages in `versions`; None if it can.

    A version that cannot be compared, such as that of a source build, counts as new enough.
    """
    return _lacks(backend.requires, versions)


def runtime_problem(backend: Backend, runtime: str, versions: Mapping[str, str]) -> str | None:
    """Return why a runtime of the backend cannot be used, if it needs a package of its own; None if it can."""
    return _lacks(backend.runtime_requires.get(runtime), versions)


def _lacks(needs: Requirement | None, versions: Mapping[str, str]) -> str | None:
    if needs is None:
        return None
    version = versions.get(needs.package)
    if version is None:
        return f"it needs {needs.package} {needs.minimum} or newer, which is not installed"
    if in_range(version, f"<{needs.minimum}"):
        return f"it needs {needs.package} {needs.minimum} or newer, and {version} is installed"
    return None


def pip_line(backend: Backend, runtime: str = "default") -> str | None:
    """Return the command that installs or upgrades the packages of the backend or runtime; None if it needs none."""
    needs = backend.runtime_requires.get(runtime, backend.requires)
    return install_extra(needs.extra) if needs is not None else None


def usable(versions: Mapping[str, str]) -> list[Scheme]:
    """Return the schemes to which a load can quantize with the packages in `versions`, given nothing but a name."""
    return [
        row
        for row in registry.schemes()
        if row.on_the_fly
        and row.backend != "rules"  # which asks for rules
        and (problem(row.codec, versions) is None or row.name in PACKAGE_OPTIONAL)
    ]


def require(scheme: Scheme, mode: str, runtime: str, versions: Mapping[str, str]) -> None:
    """Check that the packages of the scheme are installed, if they are needed: to quantize, and for the library's own
    modules. What a runtime needs beside them: `library_kernels`.

    Args:
        mode: pre | post | found. runtime: library | plain | openvino | default.

    Raises:
        BackendUnavailableError: it is missing or too old; names the pip command and the nearest usable schemes.
    """
    backend = scheme.codec
    why = problem(backend, versions)
    if why is None or scheme.name in PACKAGE_OPTIONAL or (mode == "found" and runtime != "library"):
        return
    # Of as many bits first; of those ComfyUI's formats last, which are for its files.
    order = sorted(usable(versions), key=lambda row: (round(abs(row.bits - scheme.bits)), row.backend == "comfy"))
    here = [row.name for row in order[:_NAMED]]
    instead = f". Or use {' or '.join(filter(None, (', '.join(here[:-1]), here[-1])))}, which can be used here"
    raise BackendUnavailableError(f"Cannot use {scheme.name}", why, f"Run: {pip_line(backend)}{instead}")

"""Needs of Nunchaku's kernels, known before anything is downloaded: facts, a row each. Imports no torch.

They are those of diffusers' layers for its `nunchaku_lite` (quantizers/nunchaku): the package `kernels` fetches them
from the hub when that module of diffusers is imported, if the user lets it run code of unknown publishers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ..core import Requirement

REPOSITORY = "rootonchair/nunchaku-lite-kernels"
CODES = "qweight"  # the part of a weight in their order that no other has
TRUST = "DIFFUSERS_TRUST_REMOTE_KERNELS"
PACKAGES = (
    Requirement(package="kernels", minimum="0.14", extra="nunchaku"),
    Requirement(package="diffusers", minimum="0.40", extra=""),  # which sdquant itself needs
)
# The first generation of cards for each scheme, with its compute capability; Hopper, between them, is none of them.
_TURING, _BLACKWELL = ("Turing", (7, 5)), ("Blackwell", (10, 0))
_FIRST: Mapping[str, tuple[str, tuple[int, int]]] = {
    "svdquant_w4a4": _TURING, "awq_w4a16": _TURING, "svdquant_nvfp4": _BLACKWELL,
}  # fmt: skip
_HOPPER = 9
_YES = frozenset({"1", "ON", "YES", "TRUE"})  # as diffusers reads its variables
SCHEMES = frozenset(_FIRST)


@dataclass(frozen=True)
class Lack:
    """Why the kernels cannot be used, a clause, and what to do: a sentence without its end. extra: of sdquant, that
    installs what is missing; "" if that does not help."""

    why: str
    fix: str
    extra: str = ""


def lack(
    scheme: str, kind: str, capability: tuple[int, int] | None, versions: Mapping[str, str], trusted: bool
) -> Lack | None:
    """Return the first thing that keeps Nunchaku's kernels from multiplying weights in a scheme; None if nothing does.

    Args:
        kind: of the device. capability: of the card; None if it is not known. versions: of installed packages.
        trusted: whether diffusers may run code of unknown publishers.
    """
    plain = 'Use runtime="plain", which runs on every device'
    if kind != "cuda":
        return Lack("Nunchaku's kernels are for NVIDIA's cards", plain)
    if capability is not None:
        this = f"this one has compute capability {_dotted(capability)}"
        name, least = _FIRST[scheme]
        if capability[0] == _HOPPER:
            return Lack(f"Nunchaku's kernels do not run on Hopper cards, and {this}", plain)
        if capability < least:
            why = f"Nunchaku's kernels for it need a {name} card ({_dotted(least)}) or newer, and {this}"
            return Lack(why, plain)
    for row in PACKAGES:
        version = versions.get(row.package)
        if version is None or _is_older(version, row.minimum):
            there = "which is not installed" if version is None else f"and {version} is installed"
            why = f"Nunchaku's kernels need {row.package} {row.minimum} or newer, {there}"
            fix = f"Install sdquant with its extra {row.extra!r}" if row.extra else f"Upgrade {row.package}"
            return Lack(why, f'{fix}. Or use runtime="plain"', row.extra)
    if trusted:
        return None
    return Lack(
        f"diffusers downloads Nunchaku's kernels from the hub ({REPOSITORY}), whose publisher it does not know, and "
        "runs such code only if it is told to",
        f'Set {TRUST}=true in the environment before Python starts, if you trust it. Or use runtime="plain"',
    )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _is_older(version: str, minimum: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) < Version(minimum)
    except InvalidVersion:  # of a source build
        return False


def trusts_remote_kernels() -> bool:
    """Return whether diffusers runs kernels of unknown publishers: it looks at the environment when it is imported."""
    setting = getattr(sys.modules.get("diffusers.utils.constants"), TRUST, None)
    if setting is not None:
        return bool(setting)
    return _is_set(TRUST) and not _is_set("DIFFUSERS_DISABLE_REMOTE_CODE")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").upper() in _YES

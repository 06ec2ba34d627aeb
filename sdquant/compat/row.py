"""Rules of the compatibility matrix, and queries that are looked up in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..core import OFFLOAD_MODES
from .hardware import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from packaging.specifiers import SpecifierSet

    from ..core import Scheme

DEVICES = KINDS
MODES = ("pre", "post", "found")
OFFLOADS = OFFLOAD_MODES
RUNTIMES = ("default", "library", "plain", "openvino")
COMPUTES = ("float", "int8", "fp8", "fp4")
ORIGINS = ("made", "files")
SOURCES = ("weights", "all-in-one")
VERDICTS = ("works", "slow", "untested", "breaks")
REFUSALS = ("combination", "file", "backend")


def meant(runtime: str | None, compute: str | None) -> str | None:
    """Return the requested runtime: the named one, else "plain" if `compute` needs it."""
    return "plain" if runtime is None and compute not in (None, "float") else runtime


# "*", one name, or a set of names.
Pattern = str | frozenset[str]


def any_of(*names: str) -> frozenset[str]:
    """Return a pattern that matches each of `names`."""
    return frozenset(names)


@dataclass(frozen=True, kw_only=True)
class Query:
    """One combination, with every axis named.

    Attributes:
        backend: name of the backend.
        scheme: canonical name of the scheme.
        mode: "pre" (quantized while loading), "post" (after it) or "found" (quantized already on disk).
        offload: name of the offload mode.
        runtime: "library", "plain" or "openvino" if the user named it, else "default".
        device: kind of the compute device.
        source: "weights", or "all-in-one" for a checkpoint that also contains the VAE and text encoders.
        compute: numeric type of the products: "float", "int8", "fp8" or "fp4".
        origin: "made" if sdquant quantizes models to the scheme, "files" if it only reads it from files.
        versions: installed distributions and their versions.
    """

    backend: str
    scheme: str
    mode: str
    offload: str
    runtime: str
    device: str
    source: str = "weights"
    compute: str = "float"
    origin: str = "made"
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, scheme: Scheme, **axes: Any) -> Query:
        """Return the query of a scheme; `axes` are the other fields."""
        origin = "made" if scheme.on_the_fly else "files"
        return cls(backend=scheme.backend, scheme=scheme.name, origin=origin, **axes)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rule about combinations: patterns, a verdict and the evidence.

    Attributes:
        backend, scheme, mode, offload, runtime, device, source, compute, origin: patterns for the fields of `Query`.
        versions: distribution name to version range; the rule applies only if each is installed in its range.
        verdict: works, slow, untested (warns) or breaks (is refused).
        why: the reason, in the library's own words if it has an error message.
        fix: alternative to suggest; required if the verdict is "breaks".
        seen: the test that shows it, or the public document or issue that says so.
        refuses: cause of a "breaks" verdict: the combination, the file itself, or the backend (its device).
    """

    backend: Pattern = "*"
    scheme: Pattern = "*"
    mode: Pattern = "*"
    offload: Pattern = "*"
    runtime: Pattern = "*"
    device: Pattern = "*"
    source: Pattern = "*"
    compute: Pattern = "*"
    origin: Pattern = "*"
    versions: Mapping[str, str] = field(default_factory=dict)
    verdict: str
    why: str
    fix: str = ""
    seen: str
    refuses: str = "combination"

    def __post_init__(self) -> None:
        for axis, known in _KNOWN.items():
            value = getattr(self, axis)
            names = value if isinstance(value, frozenset) else {value}
            if unknown := names - {"*", *known}:
                raise ValueError(f"a row has {axis} {sorted(unknown)}, which is none of {known}: {self}")
        if self.verdict == "breaks" and not self.fix:
            raise ValueError(f"a row that breaks has no fix: {self}")

    def matches(self, query: Query) -> bool:
        """Return whether the rule applies to this combination."""
        return all(_fits(getattr(self, axis), getattr(query, axis)) for axis in AXES) and all(
            name in query.versions and in_range(query.versions[name], specifier)
            for name, specifier in self.versions.items()
        )


AXES = ("backend", "scheme", "mode", "offload", "runtime", "device", "source", "compute", "origin")

_KNOWN = {
    "mode": MODES,
    "offload": OFFLOADS,
    "runtime": RUNTIMES,
    "device": DEVICES,
    "source": SOURCES,
    "compute": COMPUTES,
    "origin": ORIGINS,
    "verdict": VERDICTS,
    "refuses": REFUSALS,
}


def _fits(pattern: Pattern, value: str) -> bool:
    return value in pattern if isinstance(pattern, frozenset) else pattern in ("*", value)


def in_range(version: str, specifier: str) -> bool:
    """Return whether `version` is in the range `specifier`, such as ">=0.48,<1". Pre-releases and local builds count.

    An invalid version (a source build may have "unknown") is in no range.
    """
    from packaging.version import InvalidVersion, Version

    try:
        return _specifiers(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


@lru_cache(maxsize=256)
def _specifiers(specifier: str) -> SpecifierSet:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier)

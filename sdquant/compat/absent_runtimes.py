"""Why a scheme lacks a runtime that people ask for, or has it by another library: facts, a row each. No torch."""

from __future__ import annotations

from collections.abc import Mapping

# Looked at in November 2026: the wheels are beside Nunchaku's source, for NVIDIA cards; what package indexes have under
# its name is an unrelated package.
_NUNCHAKU = "which no package index has (its `nunchaku` is an unrelated package)"
_WHY: Mapping[tuple[str, str], str] = {
    ("svdquant_nvfp4", "library"): f"comfy-kitchen has no kernel for it, and Nunchaku's cannot be used, {_NUNCHAKU}",
}
_INSTEAD: Mapping[tuple[str, str], str] = {
    ("svdquant_w4a4", "library"): f"multiplies with comfy-kitchen's kernels, not with Nunchaku's, {_NUNCHAKU}",
}


def why(scheme: str, runtime: str) -> str | None:
    """Return a clause that says why a scheme lacks a runtime; None if there is nothing to say but that it does."""
    return _WHY.get((scheme, runtime))


def instead(scheme: str, runtime: str) -> str | None:
    """Return what a runtime does, if it is by another library than that which a scheme is known for."""
    return _INSTEAD.get((scheme, runtime))

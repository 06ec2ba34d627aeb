"""What the name of a file promises of its quantization, against what its header shows."""

from __future__ import annotations

import re
from pathlib import Path

from ..core import registry


def name_warnings(path: str, hint: str | None, quant: str | None) -> list[str]:
    """Return a warning if a file's name promises another scheme (`hint`) than its header shows."""
    if hint is None or _keeps_promise(hint, quant):
        return []
    return [f"the name of {Path(path).name} promises {hint}, but its header shows {quant or 'no quantization'}"]


# What a name promises, and the scheme that such a file is read as.
_SAME_IN_FILES = (
    ("fp8", "qfloat8"), ("qint8", "int8_row"), ("int4", "svdquant_w4a4"), ("int4", "awq_w4a16"),
    ("comfy:nvfp4", "svdquant_nvfp4"),
)  # fmt: skip


def _keeps_promise(hint: str, quant: str | None) -> bool:
    """Return whether a file name's hint fits the scheme: "int8" or "fp8" is used for every scheme of that kind."""
    if quant is None:
        return registry.scheme(hint).bits >= 16
    if registry.scheme(quant).least_bits is not None:  # several types under one name: the hint may be one of them
        return True
    of_kind = quant.endswith(hint) or quant.startswith(f"{hint}_")
    return same_scheme(hint, quant) or of_kind or (hint, quant) in _SAME_IN_FILES


def same_scheme(requested: str, detected: str | None) -> bool:
    """Return whether the detected scheme is the requested one; a GGUF mix equals its main type, both ways."""
    if detected is None:
        return False
    if requested == detected:
        return True
    one, other = registry.scheme(requested), registry.scheme(detected)
    return one.backend == other.backend == "gguf" and re.sub(r"_[sml]$", "", one.name) == re.sub(
        r"_[sml]$", "", other.name
    )

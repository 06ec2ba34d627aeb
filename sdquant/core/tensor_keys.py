"""Names of tensors in files."""

from __future__ import annotations


def leaf(name: str, part: str) -> str:
    """Return the key of a tensor next to a weight: leaf("proj.weight", "SCB") is "proj.SCB"."""
    head, dot, _ = name.rpartition(".")
    return f"{head}{dot}{part}"

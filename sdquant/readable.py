"""Numbers as people write them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes as people read them: "3.8 MB"."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"

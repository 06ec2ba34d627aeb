"""Names of tensors in files and state dicts."""

from __future__ import annotations

import re


def leaf(name: str, part: str) -> str:
    """Return the key of a tensor next to a weight: leaf("proj.weight", "SCB") is "proj.SCB"."""
    head, dot, _ = name.rpartition(".")
    return f"{head}{dot}{part}"


# The static ranges of activation products.
RANGE_OPERAND = re.compile(r"(einsum|dot_general)\d+_(lhs|rhs)")
RANGE_BUFFER = re.compile(rf"{RANGE_OPERAND.pattern}_(scale|zero_point)")


def is_range(key: str) -> bool:
    """Return whether a state dict key is that of a product's range."""
    return RANGE_BUFFER.fullmatch(key.rpartition(".")[2]) is not None

"""State dict keys of the static ranges of activation products."""

from __future__ import annotations

import re

OPERAND = re.compile(r"(einsum|dot_general)\d+_(lhs|rhs)")


BUFFER = re.compile(rf"{OPERAND.pattern}_(scale|zero_point)")


def is_range(key: str) -> bool:
    """Return whether a state dict key is that of a product's range."""
    return BUFFER.fullmatch(key.rpartition(".")[2]) is not None

"""The keys of state dicts under which the static ranges of products are kept."""

from __future__ import annotations

import re

OPERAND = re.compile(r"(einsum|dot_general)\d+_(lhs|rhs)")


BUFFER = re.compile(rf"{OPERAND.pattern}_(scale|zero_point)")


def is_range(key: str) -> bool:
    """Whether a key of a state dict is that of a product's range."""
    return BUFFER.fullmatch(key.rpartition(".")[2]) is not None

"""Weights that the options `gptq`, `imatrix` and `range` leave as they would be without: facts of their encoders."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..core import GPTQ, IMATRIX, RANGE, gguf_mixes, gguf_types

if TYPE_CHECKING:
    from ..core import QuantSpec

# By scheme: the weights that share a scale where blocks may end within rows, or the option that says how many.
_RANGES: dict[str, str | int] = {"nf4": "block_size", "fp4": "block_size", "qint3": "group_size", "comfy:nvfp4": 16}


def without_effect(spec: QuantSpec, shape: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Yield each of these options that a spec has set and that changes nothing in a weight of this shape, and why."""
    scheme, columns = spec.scheme, math.prod(shape[1:])
    gptq, imatrix, searched = (name in scheme.options and bool(spec[name]) for name in (GPTQ, IMATRIX, RANGE))
    if gptq and scheme.name == "comfy:nvfp4" and columns % 16:
        yield GPTQ, "rows are no whole blocks of 16"
    has_branch = len(shape) > 2 and "svd" in scheme.options and spec["svd"]
    if gptq and has_branch:
        yield GPTQ, "codes of convolutions beside singular values cannot be chosen one by one"
    if imatrix:
        block = gguf_types.TYPES[gguf_mixes.BASES.get(scheme.name, scheme.name)].block
        if columns % block:
            yield IMATRIX, f"rows are no whole blocks of {block}"
    if searched:
        option = _RANGES.get(scheme.name)
        size = int(spec[option]) if isinstance(option, str) else option
        if size and columns % size:
            yield RANGE, f"rows are no whole blocks of {size}"
        if has_branch:
            yield RANGE, "scales of convolutions beside singular values cannot be chosen one by one"
        elif scheme.backend == "sdnq" and math.prod(shape[2:]) > 1:
            yield RANGE, "each position of a kernel has scales of its own"

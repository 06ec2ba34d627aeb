"""Weights that the options `gptq` and `imatrix` leave as they would be without: facts of their encoders."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..core import GPTQ, IMATRIX, gguf_mixes, gguf_types

if TYPE_CHECKING:
    from ..core import QuantSpec


def without_effect(spec: QuantSpec, shape: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Yield each of these options that a spec has set and that changes nothing in a weight of this shape, and why."""
    scheme, columns = spec.scheme, math.prod(shape[1:])
    gptq, imatrix = (name in scheme.options and bool(spec[name]) for name in (GPTQ, IMATRIX))
    if gptq and scheme.name == "comfy:nvfp4" and columns % 16:
        yield GPTQ, "rows are no whole blocks of 16"
    if gptq and len(shape) > 2 and "svd" in scheme.options and spec["svd"]:
        yield GPTQ, "codes of convolutions beside singular values cannot be chosen one by one"
    if imatrix:
        block = gguf_types.TYPES[gguf_mixes.BASES.get(scheme.name, scheme.name)].block
        if columns % block:
            yield IMATRIX, f"rows are no whole blocks of {block}"

"""Quantize a weight as its scheme does, and better with the options that cost no byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core import GPTQ, RANGE
from . import _gptq, _range_search

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import Packed, QuantSpec


def encode(weight: Tensor, spec: QuantSpec) -> Packed:
    """Quantize a weight [out, in, ...]; with the options for that, search ranges and choose codes anew."""
    packed = spec.scheme.codec.encode(weight, spec)
    if RANGE in spec.scheme.options and spec[RANGE]:
        packed = _range_search.with_ranges(weight, packed, spec)
    if GPTQ in spec.scheme.options and spec[GPTQ]:
        packed = _gptq.choose_codes(weight, packed, spec)
    return packed

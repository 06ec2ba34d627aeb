"""Memory of a compiled model, besides the packed weights that it was built from.

As measured (bench/results/openvino_memory.json, OpenVINO 2026.4): a copy of the codes, and scales and zero points as
floats; for convolutions, which OpenVINO dequantizes once, the weight in float32 and again in the inference precision;
and a constant for each layer, including code generated at run time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LAYER = 700_000  # bytes
EIGHT, FOUR = 1.08, 1.4  # of the packed bytes, by the bits of the codes
WIDE = 4  # bytes of a number in float32


@dataclass(frozen=True)
class CompiledWeight:
    """A packed weight: its bytes, the bits per code, and the shape of the float weight."""

    nbytes: int
    bits: float
    shape: tuple[int, ...]


def copied_bytes(weights: Iterable[CompiledWeight], itemsize: int) -> int:
    """Return the bytes of the compiled copy of these weights.

    Args:
        itemsize: bytes of a number of the model's dtype.
    """
    return sum(_copied(one, itemsize) for one in weights)


def _copied(one: CompiledWeight, itemsize: int) -> int:
    if math.prod(one.shape[2:]) > 1:
        return LAYER + math.prod(one.shape) * (WIDE + itemsize)
    return LAYER + int(one.nbytes * (FOUR if one.bits <= 4 else EIGHT))

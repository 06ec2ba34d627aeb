"""What a compiled model takes in memory, beside the packed weights that it was made from.

As measured (bench/results/openvino_memory.json, OpenVINO 2026.4): the codes once more, and scales and zero points as
floats; of convolutions, which OpenVINO decodes once, floats in float32 and again in the precision that it computes in;
and what each layer takes by itself, code made at run time among it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LAYER = 700_000  # bytes
EIGHT, FOUR = 1.08, 1.4  # of the packed bytes, by the bits of the codes
WIDE = 4  # bytes of a number in float32


@dataclass(frozen=True)
class Held:
    """A packed weight: its bytes, the bits of a code, and the shape that it stands for."""

    nbytes: int
    bits: float
    shape: tuple[int, ...]


def copied(weights: Iterable[Held], itemsize: int) -> int:
    """Bytes of the compiled copy of these weights.

    Args:
        itemsize: bytes of a number of the model's dtype.
    """
    return sum(_copied(one, itemsize) for one in weights)


def _copied(one: Held, itemsize: int) -> int:
    if math.prod(one.shape[2:]) > 1:
        return LAYER + math.prod(one.shape) * (WIDE + itemsize)
    return LAYER + int(one.nbytes * (FOUR if one.bits <= 4 else EIGHT))

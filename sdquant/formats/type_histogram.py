"""Histogram of a component's weights by type, with bits per weight, and the layers left in high precision."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..core import DTYPE_BITS, registry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .checkpoint import Checkpoint

SHOWN = 8  # names of weights in high precision that are listed


@dataclass(frozen=True)
class TypeRow:
    """One type of weight.

    Attributes:
        type: scheme of quantized weights, else dtype.
        tensors: how many. weights: how many numbers they stand for. bytes: what they take.
    """

    type: str
    tensors: int
    weights: int
    bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Return the bits per weight, including scales and minimums."""
        return 8 * self.bytes / max(self.weights, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self) | {"bits_per_weight": round(self.bits_per_weight, 3)}


def histogram(sources: Iterable[Checkpoint]) -> tuple[TypeRow, ...]:
    """Return a row for each type, the one with the most weights first."""
    rows: dict[str, TypeRow] = {}

    def add(kind: str, weights: int, nbytes: int) -> None:
        old = rows.get(kind, TypeRow(kind, 0, 0, 0))
        rows[kind] = TypeRow(kind, old.tensors + 1, old.weights + weights, old.bytes + nbytes)

    for src in sources:
        for name, weight in src.prequantized.items():
            add(weight.scheme, weights_of(src, name), src.prequantized_bytes(name))
        for info in src.plain.values():
            add(info.dtype, math.prod(info.shape), info.nbytes)
    return tuple(sorted(rows.values(), key=lambda row: -row.weights))


def high_precision(src: Checkpoint) -> list[str]:
    """Return the unquantized weights of a partly quantized model, largest first; numbers in names become `*`."""
    if not src.prequantized:
        return []
    sizes: dict[str, int] = {}
    for name, info in src.plain.items():
        if len([n for n in info.shape if n > 1]) > 1:  # not norms and biases
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
            sizes[pattern] = sizes.get(pattern, 0) + info.nbytes
    return sorted(sizes, key=lambda pattern: (-sizes[pattern], pattern))


def weights_of(src: Checkpoint, name: str) -> int:
    """Return the number of values in a quantized weight, by its spec, else by the bits of its scheme."""
    if name in src.specs:
        return math.prod(src.specs[name].shape)
    weight = src.prequantized[name]
    if weight.cut is not None:
        return math.prod(weight.cut.shape[1:]) * weight.cut.count
    if weight.shape is not None:
        return math.prod(weight.shape)
    codes = src.tensors[next(iter(weight.keys.values()))]
    if codes.dtype not in DTYPE_BITS:  # a GGUF type: the header gives the float weight's shape
        return math.prod(codes.shape)
    bits = weight.details.get("bits", registry.scheme(weight.scheme).bits)
    return int(math.prod(codes.shape) * DTYPE_BITS[codes.dtype] / bits)

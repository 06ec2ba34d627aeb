"""GGUF weights of a few blocks over and over, for types that take hours to encode: SDXL's UNet in `iq1_m` takes seven.

How long a step takes does not depend on what the codes are, so that such weights are as good for timing one. What comes
out of it is not: `without_outputs` takes that from the results.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sdquant import backends
from sdquant.core.gguf_mixes import BASES
from sdquant.core.gguf_types import TYPES

if TYPE_CHECKING:
    from torch import Tensor

    from sdquant.core.backend import Packed, QuantSpec
    from sdquant.core.gguf_types import GGMLType

NOTE = "of each weight {} blocks are encoded, which repeat"


def blocks(text: str) -> int:
    """A number of blocks on a command line: at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is no number of blocks; it is at least 1")
    return value


def repeats(scheme: str) -> bool:
    """Whether weights in this scheme are made of repeated blocks: those in GGUF's types for blocks, not its floats."""
    row = backends.parse(scheme).scheme
    return row.backend == "gguf" and not _type(row.name).dtype


def _type(scheme: str) -> GGMLType:
    """GGUF's type of a scheme; of a mix that of most weights."""
    return TYPES[BASES.get(scheme, scheme)]


@contextmanager
def repeated(count: int) -> Iterator[None]:
    """Have GGUF weights encoded so: the first `count` blocks of each tensor, and then these again."""
    backend: Any = type(backends.get("gguf"))
    encode = backend.encode

    def some(self: Any, weight: Tensor, spec: QuantSpec) -> Packed:
        size = _type(spec.scheme.name).block
        if not repeats(spec.scheme.name) or weight.numel() <= count * size or weight.numel() % size:
            whole: Packed = encode(self, weight, spec)
            return whole
        few: Packed = encode(self, weight.reshape(-1, size)[:count], spec)
        number = weight.numel() // size
        return dataclasses.replace(
            few,
            spec=dataclasses.replace(few.spec, shape=tuple(weight.shape)),
            parts={name: part.repeat(-(-number // count), 1)[:number] for name, part in few.parts.items()},
        )

    backend.encode = some
    try:
        yield
    finally:
        backend.encode = encode


def without_outputs(rows: Iterable[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Rows of a benchmark with such weights: no SNR, and a note."""
    untold = {"snr": None, "note": NOTE.format(count)}
    return [
        {**row, **(untold if row["quant"] and row["snr"] is not None and repeats(row["quant"]) else {})} for row in rows
    ]

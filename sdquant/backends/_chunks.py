"""Encode a weight some rows at a time, for codecs whose rows do not depend on each other, and decode it so.

A library's own function makes several temporaries of the size of the weight. Fresh memory costs more than the
arithmetic does: for int8 on a CPU, three quarters of the time are page faults. A chunk's temporaries stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..core import dtype_named
from ..utils.buffers import empty
from ..utils.chunk_sizes import weights_at_once

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import TensorSpec

CHUNK = {"cpu": 1 << 18}  # weights encoded at a time
CHUNK_ELSEWHERE = 1 << 25  # a GPU wants large pieces, and its memory is given back at once
ROWS = 8  # chunks begin at multiples of it: codes of two rows that share a byte stay together


def row_chunks(codes: Tensor, columns: int) -> Iterator[slice]:
    """Yield slices of the rows of `codes` of which so many are decoded at a time, for `columns` weights in a row."""
    step = max(1, weights_at_once(codes.device) // max(1, columns))
    for start in range(0, len(codes), step):
        yield slice(start, start + step)


def by_rows(
    weight: Tensor, layout: Mapping[str, TensorSpec], encode: Callable[[Tensor], Mapping[str, Tensor]], times: int = 1
) -> dict[str, Tensor]:
    """Encode `weight`, [rows, ...], some rows at a time. Return the parts that `encode` would give for all of it.

    Args:
        layout: the parts of the whole. The first dimension of each must be in proportion to the weight's rows.
        times: how much larger than others a chunk on a CPU is.
    """
    rows, kind = len(weight), weight.device.type
    step = (CHUNK[kind] * times if kind in CHUNK else CHUNK_ELSEWHERE) // max(1, weight[0].numel()) // ROWS * ROWS
    step = max(ROWS, step)
    if rows <= step:
        return dict(encode(weight))
    whole = {
        name: empty(part.shape, dtype_named(part.dtype), weight.device) for name, part in layout.items()
    }  # fmt: skip
    start = 0
    while start < rows:
        stop = rows if rows - start < step + ROWS else start + step  # never a single row, which quanto treats apart
        for name, piece in encode(weight[start:stop]).items():
            first = start * len(whole[name]) // rows
            whole[name][first : first + len(piece)] = piece
        start = stop
    return whole

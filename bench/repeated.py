"""GGUF files of a few blocks over and over, for types that take hours to encode: SDXL's UNet in `iq1_m` takes seven.

How long a step takes does not depend on what the codes are, so that such a file is as good for timing one. What comes
out of it is not: `without_outputs` takes that from the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NOTE = "of each weight {} blocks are encoded, which repeat"


@contextmanager
def repeated(blocks: int) -> Iterator[None]:
    """Have GGUF weights encoded so: the first `blocks` blocks of each tensor, and then these again."""
    from sdquant.backends import gguf
    from sdquant.formats.gguf_types import TYPES

    encode = gguf._encode

    def some(weight: Tensor, kind: str) -> Tensor:
        size = TYPES[kind].block
        made = encode(weight.reshape(-1)[: blocks * size], kind)
        count = weight.numel() // size
        return made.repeat(-(-count // len(made)), 1)[:count].contiguous()

    gguf._encode = some
    try:
        yield
    finally:
        gguf._encode = encode


def without_outputs(rows: Iterable[Mapping[str, Any]], blocks: int) -> list[dict[str, Any]]:
    """Rows of a benchmark with such files: no SNR, and a note."""
    return [
        dict(row) | ({"snr": None, "note": NOTE.format(blocks)} if row["quant"] and row["snr"] is not None else {})
        for row in rows
    ]

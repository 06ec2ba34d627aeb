"""Decomposition of packed weights into chunks of weights that share one scale.

A chunk is `planes` times `lanes` weights: a program reads one byte for each lane, and extracts a weight of each plane
from it; words of eight where two neighbours share a byte. `order` says where those weights are in the row; g is the
number of a chunk, l a lane, p a plane:

* "run":    g * planes * lanes + p * lanes + l
* "halves": g // 2 * 128 + 32 * p + 16 * (g % 2) + l, in GGUF blocks of 256 with 16 scales
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core import PackedLayout

# Weights in a chunk of a packing that keeps its scales elsewhere: the first, of which usual groups are multiples, or
# the second, the group of NVFP4.
CHUNKS = (32, 16)
GRIDS = "grids"  # family of blocks whose codes are indices of tables
# The largest weight that is read: indices are 32-bit numbers, and a GGUF block has more bytes than weights.
MOST = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Block:
    """A packing. The positions of the fields of GGUF blocks are in `core.gguf_fields`.

    Attributes:
        family: the device function that reads it.
        planes, lanes, order: see the module.
        chunks: number of chunks in a GGUF block.
        zero: zero point of the codes of a GGUF block.
        table: name of the lookup table for the codes of a GGUF block, "" for none.
    """

    family: str
    planes: int
    lanes: int
    order: str = "run"
    chunks: int = 1
    zero: int = 0
    table: str = ""

    @property
    def weights(self) -> int:
        """Return the number of weights in a chunk."""
        return self.planes * self.lanes

    @property
    def aligned_to(self) -> int:
        """Return the number of weights that a row must be a multiple of to begin at a chunk where kernels can begin."""
        return self.weights * self.chunks


def _simple(**fields: int | str) -> Block:
    """Return a block of 32 weights with one scale, two in a byte, the first half of them in the low bits."""
    return Block(family="nibbles", planes=2, lanes=16, **fields)  # type: ignore[arg-type]


def _of_grid(lanes: int, table: str) -> Block:
    """Return a block of 256 weights that are in a table, in chunks with one scale."""
    return Block(family=GRIDS, planes=1, lanes=lanes, chunks=256 // lanes, table=table)


# The arithmetic is that of `backends/_gguf_decode` and `_gguf_iq`.
GGUF: Mapping[str, Block] = {
    "q8_0": Block(family="bytes", planes=1, lanes=32),
    "q4_0": _simple(zero=8),
    "q4_1": _simple(),
    "q5_0": _simple(zero=16),
    "q5_1": _simple(),
    "iq4_nl": _simple(table="iq4"),
    "q4_k": Block(family="eights", planes=2, lanes=32, chunks=4),
    "q5_k": Block(family="eights", planes=2, lanes=32, chunks=4),
    "q2_k": Block(family="q2_k", planes=4, lanes=16, order="halves", chunks=4),
    "q3_k": Block(family="q3_k", planes=4, lanes=16, order="halves", chunks=4, zero=4),
    "q6_k": Block(family="q6_k", planes=4, lanes=16, order="halves", chunks=4, zero=32),
    "iq4_xs": Block(family="iq4_xs", planes=2, lanes=16, chunks=8, table="iq4"),
    "mxfp4": Block(family="mxfp4", planes=2, lanes=16, table="e2m1 twice"),
    "nvfp4": Block(family="nvfp4", planes=2, lanes=8, chunks=4, table="e2m1 twice"),
    "tq2_0": Block(family="tq2_0", planes=4, lanes=32, chunks=2, zero=1),
    "tq1_0": Block(family="tq1_0", planes=1, lanes=16, chunks=16, zero=1),
    "iq3_s": _of_grid(32, "iq3_s"),
    "iq3_xxs": _of_grid(32, "iq3_xxs"),
    "iq2_s": _of_grid(16, "iq2_s"),
    "iq2_xs": _of_grid(16, "iq2_xs"),
    "iq2_xxs": _of_grid(32, "iq2_xxs"),
    "iq1_m": _of_grid(16, "iq1_m"),
    "iq1_s": _of_grid(16, "iq1_s"),
}

# Packings of `packed_layout` other than blocks. float8 is decoded by arithmetic: GPUs before Ada have no such type.
_CODES = (
    "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "nibbles-low", "nibbles-high", "planes4", "planes2", "twos",
    "threes", "fives", "sixes", "sevens", "sdnq6", "sdnq3",
)  # fmt: skip
TABLES = ("", "nf4", "fp4", "e4m3", "e2m1")
ZEROS = ("uint8", "int8", "nibbles-low")


def block_of(form: PackedLayout) -> Block | None:
    """Return the chunks of such a weight; None if no kernel can read it."""
    if form.rows * form.columns > MOST:
        return None
    if form.packing in GGUF:
        return GGUF[form.packing]
    if form.packing not in _CODES or form.table not in TABLES or form.zero_packing not in ZEROS:
        return None
    halved = form.packing.startswith("nibbles")  # read by words
    for chunk in CHUNKS:
        if form.group % chunk == 0 and not (halved and form.rows * form.columns % chunk):
            return Block(family="form", planes=1, lanes=chunk)
    return Block(family="form", planes=1, lanes=1)  # each weight looks up its own scale: slow, and rare

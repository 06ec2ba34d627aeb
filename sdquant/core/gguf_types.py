"""The tensor types of GGUF as rows: number in the file, weights per block, bytes per block.

Numbers and sizes are those of ggml's `enum ggml_type` and its block structs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class GGMLType:
    """One tensor type.

    Attributes:
        name: lower-case name, e.g. "q4_k".
        id: its number in the file.
        block: weights per block; 1 for plain numbers.
        nbytes: bytes per block.
        dtype: torch dtype name of plain numbers; None for block types.
        halves: byte offsets in a block of its half-precision scales and minimums. Types whose scales are of another
            kind have a check of their own in `backends/_gguf_blocks.py`.
    """

    name: str
    id: int
    block: int
    nbytes: int
    dtype: str | None = None
    halves: tuple[int, ...] = ()

    def size(self, numel: int) -> int:
        """Return the size of `numel` weights in bytes; they must be a whole number of blocks."""
        return numel // self.block * self.nbytes


_ROWS = (
    GGMLType("f32", 0, 1, 4, "float32"),
    GGMLType("f16", 1, 1, 2, "float16"),
    GGMLType("q4_0", 2, 32, 18, halves=(0,)),
    GGMLType("q4_1", 3, 32, 20, halves=(0, 2)),
    GGMLType("q5_0", 6, 32, 22, halves=(0,)),
    GGMLType("q5_1", 7, 32, 24, halves=(0, 2)),
    GGMLType("q8_0", 8, 32, 34, halves=(0,)),
    GGMLType("q2_k", 10, 256, 84, halves=(80, 82)),
    GGMLType("q3_k", 11, 256, 110, halves=(108,)),
    GGMLType("q4_k", 12, 256, 144, halves=(0, 2)),
    GGMLType("q5_k", 13, 256, 176, halves=(0, 2)),
    GGMLType("q6_k", 14, 256, 210, halves=(208,)),
    GGMLType("iq2_xxs", 16, 256, 66, halves=(0,)),
    GGMLType("iq2_xs", 17, 256, 74, halves=(0,)),
    GGMLType("iq3_xxs", 18, 256, 98, halves=(0,)),
    GGMLType("iq1_s", 19, 256, 50, halves=(0,)),
    GGMLType("iq4_nl", 20, 32, 18, halves=(0,)),
    GGMLType("iq3_s", 21, 256, 110, halves=(0,)),
    GGMLType("iq2_s", 22, 256, 82, halves=(0,)),
    GGMLType("iq4_xs", 23, 256, 136, halves=(0,)),
    GGMLType("i8", 24, 1, 1, "int8"),
    GGMLType("i16", 25, 1, 2, "int16"),
    GGMLType("i32", 26, 1, 4, "int32"),
    GGMLType("i64", 27, 1, 8, "int64"),
    GGMLType("f64", 28, 1, 8, "float64"),
    GGMLType("iq1_m", 29, 256, 56),
    GGMLType("bf16", 30, 1, 2, "bfloat16"),
    GGMLType("tq1_0", 34, 256, 54, halves=(52,)),
    GGMLType("tq2_0", 35, 256, 66, halves=(64,)),
    GGMLType("mxfp4", 39, 32, 17),
    GGMLType("nvfp4", 40, 64, 36),
    GGMLType("q1_0", 41, 128, 18, halves=(0,)),
)

TYPES: Mapping[str, GGMLType] = {row.name: row for row in _ROWS}
BY_ID: Mapping[int, GGMLType] = {row.id: row for row in _ROWS}

_GONE = "was removed from GGUF"
_INNER = "is a type for activations inside ggml, not for files"
# Type ids that are defined, but must not occur in files.
REFUSED: Mapping[int, str] = {
    4: f"Q4_2 {_GONE}", 5: f"Q4_3 {_GONE}", 9: f"Q8_1 {_INNER}", 15: f"Q8_K {_INNER}",
    31: f"Q4_0_4_4 {_GONE}", 32: f"Q4_0_4_8 {_GONE}", 33: f"Q4_0_8_8 {_GONE}",
    36: f"IQ4_NL_4_4 {_GONE}", 37: f"IQ4_NL_4_8 {_GONE}", 38: f"IQ4_NL_8_8 {_GONE}",
}  # fmt: skip

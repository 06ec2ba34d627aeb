"""Byte layout of GGUF blocks, and the field order that GPU kernels use.

In a file a weight is a sequence of blocks of 18, 34 or 210 bytes, so blocks are not aligned for loads of 16 or even 4
bytes. "Fields apart" are the same bytes in another order: the first field of all blocks, then the second of all blocks,
and so on. The fields with the largest powers of two in their sizes come first, and sizes but that of a last one are
even: with a multiple of 8 blocks, which nearly all weights have, every field begins at a multiple of 16 bytes, and
with any number half-precision numbers are at even addresses. No padding is added. No torch in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockField:
    """Bytes of a block: of its codes, the upper bits of them ("high"), 3- to 8-bit scales of parts of it ("scales"), or
    its half-precision numbers ("scale", "minimum"). Signs that have bytes of their own follow the codes, or come before
    the scales, as they do in blocks."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class FieldPosition:
    """Position of a field: for block b at byte `start` + b * `step`, or n * `start` + b * `step` with the fields of n
    blocks apart."""

    start: int
    step: int


def _row(*fields: tuple[str, int, int]) -> tuple[BlockField, ...]:
    return tuple(BlockField(*field) for field in fields)


# ggml's `ggml-common.h`: name, first byte, and bytes of each, in the order of fields apart.
FIELDS: Mapping[str, tuple[BlockField, ...]] = {
    "q8_0": _row(("codes", 2, 32), ("scale", 0, 2)),
    "q4_0": _row(("codes", 2, 16), ("scale", 0, 2)),
    "q4_1": _row(("codes", 4, 16), ("scale", 0, 2), ("minimum", 2, 2)),
    "q5_0": _row(("codes", 6, 16), ("high", 2, 4), ("scale", 0, 2)),
    "q5_1": _row(("codes", 8, 16), ("high", 4, 4), ("scale", 0, 2), ("minimum", 2, 2)),
    "iq4_nl": _row(("codes", 2, 16), ("scale", 0, 2)),
    "q4_k": _row(("codes", 16, 128), ("scales", 4, 12), ("scale", 0, 2), ("minimum", 2, 2)),
    "q5_k": _row(("codes", 48, 128), ("high", 16, 32), ("scales", 4, 12), ("scale", 0, 2), ("minimum", 2, 2)),
    "q2_k": _row(("codes", 16, 64), ("scales", 0, 16), ("scale", 80, 2), ("minimum", 82, 2)),
    "q3_k": _row(("codes", 32, 64), ("high", 0, 32), ("scales", 96, 12), ("scale", 108, 2)),
    "q6_k": _row(("codes", 0, 128), ("high", 128, 64), ("scales", 192, 16), ("scale", 208, 2)),
    "iq4_xs": _row(("codes", 8, 128), ("scales", 2, 6), ("scale", 0, 2)),
    "iq3_s": _row(("codes", 2, 64), ("high", 66, 8), ("scales", 74, 36), ("scale", 0, 2)),
    "iq3_xxs": _row(("codes", 2, 64), ("scales", 66, 32), ("scale", 0, 2)),
    "iq2_s": _row(("codes", 2, 64), ("high", 66, 8), ("scales", 74, 8), ("scale", 0, 2)),
    "iq2_xs": _row(("codes", 2, 64), ("scales", 66, 8), ("scale", 0, 2)),
    "iq2_xxs": _row(("codes", 2, 64), ("scale", 0, 2)),
    "iq1_m": _row(("codes", 0, 32), ("high", 32, 16), ("scales", 48, 8)),
    "iq1_s": _row(("codes", 2, 32), ("high", 34, 16), ("scale", 0, 2)),
    "tq2_0": _row(("codes", 0, 64), ("scale", 64, 2)),
    "tq1_0": _row(("codes", 0, 48), ("high", 48, 4), ("scale", 52, 2)),
    "nvfp4": _row(("codes", 4, 32), ("scales", 0, 4)),
    "mxfp4": _row(("codes", 1, 16), ("scales", 0, 1)),
}


def places(kind: str, *, apart: bool) -> dict[str, FieldPosition]:
    """Return the position of each field of a type, in blocks or apart."""
    rows = FIELDS[kind]
    if not apart:
        nbytes = sum(field.size for field in rows)
        return {field.name: FieldPosition(field.start, nbytes) for field in rows}
    result, start = {}, 0
    for field in rows:
        result[field.name] = FieldPosition(start, field.size)
        start += field.size
    return result

"""Where SDNQ puts the bits of codes that are no whole bytes, by their width.

Found by packing codes of a single bit with sdnq 0.2.8. Codes of fewer than 8 bits are packed in bytes, of 9 to 15 in
16-bit words; a unit is the fewest words that hold whole codes.
"""

from __future__ import annotations

from collections.abc import Iterable

Field = tuple[int, int, int]  # word, right shift (left where it is negative), mask: to be summed


def fields(bits: int) -> tuple[tuple[Field, ...], ...]:
    """Return the fields of each code of a unit, for codes of `bits` bits."""
    return tuple(_code(pieces) for pieces in (*_whole(bits), *_REST[bits]))


def words(bits: int) -> int:
    """Return the number of words in a unit."""
    return 1 if bits in (1, 2, 4) else _WORDS[bits]


# A code is pieces of words: (word, first bit, number of bits), those of its low bits first.
_Pieces = Iterable[tuple[int, int, int]]

_WORDS = {3: 3, 5: 5, 6: 3, 7: 7, 9: 9, 10: 5, 11: 11, 12: 3, 13: 13, 14: 7, 15: 15}
# Leading codes of a unit that are the low bits of a word each.
_LOW = {9: 8, 11: 8}

# The other codes, from what is left of the words.
_REST: dict[int, tuple[_Pieces, ...]] = {
    1: tuple(((0, bit, 1),) for bit in range(8)),
    2: tuple(((0, bit, 2),) for bit in range(0, 8, 2)),
    3: (*(((word, 3, 3),) for word in range(3)), ((0, 6, 2), (2, 6, 1)), ((1, 6, 2), (2, 7, 1))),
    4: (((0, 0, 4),), ((0, 4, 4),)),
    5: (((0, 5, 3), (3, 5, 2)), ((1, 5, 3), (4, 5, 2)), ((2, 5, 3), (4, 7, 1), (3, 7, 1))),
    6: (tuple((word, 6, 2) for word in (2, 1, 0)),),
    7: (tuple((word, 7, 1) for word in range(6, -1, -1)),),
    9: tuple(((word, 9, 7), (8, 2 * word, 2)) for word in range(8)),
    10: (((0, 10, 6), (3, 10, 4)), ((1, 10, 6), (4, 10, 4)), ((2, 10, 6), (4, 14, 2), (3, 14, 2))),
    11: (
        *(((word, 11, 5), (8 + word, 0, 6)) for word in range(3)),
        *(((word, 11, 5), (5 + word, 6, 6)) for word in range(3, 6)),
        *(((word, 11, 5), (2 + word, 12, 4), (10, 2 * word, 2)) for word in range(6, 8)),
    ),
    12: (tuple((word, 12, 4) for word in (2, 1, 0)),),
    13: tuple((*((word, 13, 3) for word in range(first, 12, 3)), (12, 13 + first, 1)) for first in range(3)),
    14: (tuple((word, 14, 2) for word in range(6, -1, -1)),),
    15: (tuple((word, 15, 1) for word in range(14, -1, -1)),),
}


def _whole(bits: int) -> tuple[_Pieces, ...]:
    return tuple(((word, 0, bits),) for word in range(_LOW.get(bits, _WORDS.get(bits, 0))))


def _code(pieces: _Pieces) -> tuple[Field, ...]:
    made, at = [], 0
    for word, first, count in pieces:
        made.append((word, first - at, ((1 << count) - 1) << at))
        at += count
    return tuple(made)

"""The values that the codes of a packed weight can stand for, with the scales that it has; and other codes in it.

What a code is worth is not written down a second time: the backend decodes the weight with its lowest code everywhere,
and with its highest. Where ggml's blocks keep each bit is read off their decoder, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from ..core import Packed, bit_fields, code_tables, ggml_iq, gguf_fields, gguf_types
from ._gguf_decode import decode_blocks
from ._sdnq_bits import fields, words

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import PackedLayout

_LOW_FIRST = (((0, 0, 15),), ((0, 4, 15),))
# By packing: the bits of the codes of a unit, and the bytes of one.
_UNITS: dict[str, tuple[bit_fields.Codes, int]] = {
    "nibbles-low": (_LOW_FIRST, 1),
    "nibbles-high": (_LOW_FIRST[::-1], 1),
    "sdnq3": (fields(3), words(3)),
    "sdnq6": (fields(6), words(6)),
    **{
        name: (bit_fields.stream(bits), bits) for bits, name in ((2, "twos"), (3, "threes"), (5, "fives"), (6, "sixes"))
    },
}
_PLANES = {"planes4": 4, "planes2": 2}  # bits of a code; see `core.packed_layout`
_BLOCKS = {
    "q4_0": 4, "q4_1": 4, "q5_0": 5, "q5_1": 5, "q2_k": 2, "q3_k": 3, "q4_k": 4, "q5_k": 5, "q6_k": 6, "iq4_nl": 4,
    "iq4_xs": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Levels:
    """The values of all codes: low + step * table[code].

    Attributes:
        low, step: float32 [rows, columns].
        table: float32 [codes]; 0, 1, 2, ... for integers.
    """

    low: Tensor
    step: Tensor
    table: Tensor


def is_known(form: PackedLayout) -> bool:
    """Return whether the codes of weights in this layout can be replaced by others of the same scales."""
    return form.packing in _UNITS or form.packing in _PLANES or form.packing in _BLOCKS


def levels_of(packed: Packed, form: PackedLayout) -> Levels:
    """Return the values of each code of a weight whose layout `is_known`."""
    table = _table(form, packed.device)
    top = int(table.argmax())
    high = _decoded(packed, form, top)
    low = _decoded(packed, form, 0) if table[0] == 0 else torch.zeros_like(high)
    return Levels(low=low, step=high.sub_(low).div_(table[top]), table=table)


def with_codes(packed: Packed, form: PackedLayout, codes: Tensor) -> Packed:
    """Return the weight with other codes, uint8 [rows, columns], and the same scales."""
    part = packed.parts[form.codes]
    if form.packing in _BLOCKS:
        bits, (units, count) = _code_bytes(form.packing), _block_units(form.packing)
        new = part & ~bits.to(part.device)
        new |= bit_fields.pack_units(codes.reshape(-1, len(units)), units, count)
    elif form.packing in _PLANES:
        new = _planes(codes.reshape(-1, form.group), _PLANES[form.packing])
    else:
        units, count = _UNITS[form.packing]
        flat = codes.reshape(-1)
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % len(units)))
        new = bit_fields.pack_units(flat.view(-1, len(units)), units, count)
    new = new.view(part.dtype).view(part.shape)
    return Packed(spec=packed.spec, parts={**packed.parts, form.codes: new})


def _table(form: PackedLayout, device: torch.device) -> Tensor:
    if form.table:
        return code_tables.code_table(form.table, form.arithmetic, device)
    if form.packing in ("iq4_nl", "iq4_xs"):
        return torch.tensor(ggml_iq.NON_LINEAR, dtype=torch.float32, device=device)
    return torch.arange(1 << _bits(form.packing), dtype=torch.float32, device=device)


def _bits(packing: str) -> int:
    if packing in _UNITS:
        return sum(mask.bit_count() for _, _, mask in _UNITS[packing][0][0])
    return _PLANES.get(packing) or _BLOCKS[packing]


def _decoded(packed: Packed, form: PackedLayout, code: int) -> Tensor:
    """Return the float32 values [rows, columns] of the weight with this code everywhere."""
    codes = torch.full((form.rows, form.columns), code, dtype=torch.uint8, device=packed.device)
    values = packed.spec.scheme.codec.decode(with_codes(packed, form, codes), torch.float32)
    return values.reshape(form.rows, form.columns)


def _planes(groups: Tensor, bits: int) -> Tensor:
    """Pack codes [rows, group] as optimum-quanto does: row r of the bytes has the rows r, r + R, ... of the R."""
    each = 8 // bits
    count = -(-len(groups) // each)
    new = torch.zeros(count, groups.shape[1], dtype=torch.uint8, device=groups.device)
    for plane in range(each):
        rows = groups[plane * count : (plane + 1) * count]
        new[: len(rows)] |= rows << plane * bits
    return new


@cache
def _code_bytes(kind: str) -> Tensor:
    """Return which bits of a block belong to codes: uint8 [bytes of a block]."""
    mask = torch.zeros(gguf_types.TYPES[kind].nbytes, dtype=torch.uint8, device="cpu")
    for field in gguf_fields.FIELDS[kind]:
        if field.name in ("codes", "high"):
            mask[field.start : field.start + field.size] = 255
    return mask


@cache
def _block_units(kind: str) -> tuple[bit_fields.Codes, int]:
    """Return the bits of each code of a block of ggml, and the bytes of one, by what its decoder makes of single bits.

    With the same scale everywhere, the bits of a code are ordered by how much each of them changes its value.
    """
    row, mask = gguf_types.TYPES[kind], _code_bytes(kind)
    places = [(byte, bit) for byte in mask.nonzero().flatten().tolist() for bit in range(8)]
    blocks = (~mask).repeat(len(places) + 1, 1)
    for half in row.halves:
        blocks[:, half : half + 2] = torch.ones(1, dtype=torch.float16, device="cpu").view(torch.uint8)
    for number, (byte, bit) in enumerate(places, 1):
        blocks[number, byte] |= 1 << bit
    values = torch.empty(len(blocks), row.block, dtype=torch.float32, device="cpu")
    decode_blocks(kind, blocks, values)
    changes = (values[1:] - values[0]).abs()
    codes = []
    for column in changes.T:
        masks: dict[tuple[int, int], int] = {}
        for power, at in enumerate(column.argsort()[-_BLOCKS[kind] :].tolist()):
            byte, bit = places[at]
            masks[byte, bit - power] = masks.get((byte, bit - power), 0) | 1 << power
        codes.append(tuple((byte, shift, bits) for (byte, shift), bits in masks.items()))
    return tuple(codes), row.nbytes

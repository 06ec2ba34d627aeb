"""Packing of codes of fewer than 8 bits, row by row: 8 codes in as many bytes as a code has bits.

A unit of 8 codes is one little-endian integer of 8 * bits bits with the first code in its lowest bits. With 4 bits that
is two codes in a byte, the first in the low half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import bit_fields
from ..packed_layout import UNIT


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 [rows, row] codes below 2**bits into uint8 [rows, row_bytes(row, bits)]."""
    rows, row = codes.shape
    short = -row % UNIT
    if short:
        codes = torch.cat([codes, codes.new_zeros(rows, short)], 1)
    if bits == 4:
        return codes[:, ::2] | (codes[:, 1::2] << 4)
    units = codes.view(rows, -1, UNIT).to(torch.int64)
    word = units[..., 0].clone()
    for place in range(1, UNIT):
        word |= units[..., place] << (bits * place)
    packed = torch.empty((*word.shape, bits), dtype=torch.uint8, device=codes.device)
    for byte in range(bits):
        packed[..., byte] = (word >> (8 * byte)) & 255
    return packed.flatten(1)


def unpack(packed: Tensor, bits: int, row: int) -> Tensor:
    """Unpack what `pack` returned: uint8 [rows, row]."""
    rows = len(packed)
    if bits == 4:
        codes = torch.empty((rows, packed.shape[1], 2), dtype=torch.uint8, device=packed.device)
        codes[..., 0] = packed & 15
        codes[..., 1] = packed >> 4
        return codes.flatten(1)[:, :row]
    return bit_fields.unpack_units(packed.reshape(-1, bits), bit_fields.stream(bits), torch.uint8).view(rows, -1)[
        :, :row
    ]

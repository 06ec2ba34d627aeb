"""SDNQ's codes: the storage of each kind, and their values.

Bit-equal to SDNQ's own, in plain torch; sdnq is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Code:
    """SDNQ's storage of codes of one kind.

    Attributes:
        sdnq: SDNQ's name of the dtype.
        dtype: torch dtype name of the stored tensor.
        low: number added to a stored code to get its value.
        zero_point: whether each scale comes with a zero point.
        fields: for packed codes, the bits of each of the codes in a unit: (byte, right shift, mask), to be summed.
            From sdnq/packed_int/unpack.py. Empty if a code is a tensor element.
        unit: bytes in a unit.
    """

    sdnq: str
    dtype: str
    low: int = 0
    zero_point: bool = False
    fields: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    unit: int = 1


_FOUR = (((0, 0, 15),), ((0, 4, 15),))
_SIX = (((0, 0, 63),), ((1, 0, 63),), ((2, 0, 63),), ((0, 2, 48), (1, 4, 12), (2, 6, 3)))
_THREE = (
    *(((byte, 0, 7),) for byte in range(3)),
    *(((byte, 3, 7),) for byte in range(3)),
    *(((byte, 6, 3), (2, 4 + byte, 4)) for byte in range(2)),
)

CODES = {
    "sdnq-int8": Code(sdnq="int8", dtype="int8"),
    "sdnq-fp8": Code(sdnq="float8_e4m3fn", dtype="float8_e4m3fn"),
    "sdnq-int6": Code(sdnq="int6", dtype="uint8", low=-32, fields=_SIX, unit=3),
    "sdnq-int4": Code(sdnq="int4", dtype="uint8", low=-8, fields=_FOUR),
    "sdnq-uint4": Code(sdnq="uint4", dtype="uint8", zero_point=True, fields=_FOUR),
    "sdnq-uint3": Code(sdnq="uint3", dtype="uint8", zero_point=True, fields=_THREE, unit=3),
}
OF_DTYPE = {code.sdnq: name for name, code in CODES.items()} | {"fp8": "sdnq-fp8"}


def numbers(stored: Tensor, code: Code, rows: slice, row: int, dtype: torch.dtype) -> Tensor:
    """Unpack the codes of some rows into a new tensor of `dtype`; flat if they are packed."""
    import torch

    if not code.fields:
        return stored[rows].to(dtype)
    per_unit = len(code.fields)
    units = stored.view(-1, code.unit)[rows.start * row // per_unit : rows.stop * row // per_unit]
    values = torch.empty((len(units), per_unit), dtype=dtype, device=stored.device)
    for column, fields in enumerate(code.fields):
        values[:, column] = sum(_field(units[:, byte], shift, mask) for byte, shift, mask in fields)
    return values.add_(code.low) if code.low else values


def _field(bytes_: Tensor, shift: int, mask: int) -> Tensor:
    return (bytes_ >> shift) & mask

"""The values of SDNQ's codes: bit-equal to SDNQ's own, in plain torch; sdnq is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import bit_fields
from ..utils.device_constants import constant

if TYPE_CHECKING:
    from ._sdnq_codes import Code


def numbers(stored: Tensor, code: Code, rows: slice, row: int, dtype: torch.dtype) -> Tensor:
    """Unpack the codes of some rows into a new tensor of `dtype`; flat if they are packed."""
    exact = dtype if code.bits < 8 and not code.exponent else torch.int32  # what holds every code
    if not code.fields:
        codes = stored[rows]
        return _floats(code, codes.to(torch.int32), dtype) if code.exponent else codes.to(dtype, copy=True)
    per_unit = len(code.fields)
    units = stored.view(-1, code.unit)[rows.start * row // per_unit : rows.stop * row // per_unit]
    units = units if code.bits < 8 else units.to(torch.int32)  # a shift to the left needs room
    values = bit_fields.unpack_units(units, code.fields, exact)
    if code.exponent:
        return _floats(code, values, dtype)
    return (values.add_(code.low) if code.low else values).to(dtype)


def _floats(code: Code, codes: Tensor, dtype: torch.dtype) -> Tensor:
    return _values(code, codes.device)[codes].to(dtype)


@constant
def _values(code: Code, device: torch.device) -> Tensor:
    """Return the value of every code of a float that torch has no dtype for: float32 [2 ** bits]."""
    codes = torch.arange(1 << code.bits, device="cpu")  # MPS has no float64
    mantissa = (codes & ((1 << code.mantissa) - 1)).double() / (1 << code.mantissa)
    exponent = (codes >> code.mantissa) & ((1 << code.exponent) - 1)
    # As in IEEE 754, with denormal numbers at exponent 0; but the largest exponent is one like the others.
    power = torch.pow(2.0, (exponent.clamp(min=1) - (1 << (code.exponent - 1)) + 1).double())
    values = (mantissa + (exponent > 0)) * power
    if not code.zero_point:
        values = torch.where(codes >> (code.bits - 1) > 0, -values, values)
    return values.float().to(device)

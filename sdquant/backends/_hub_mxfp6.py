"""Unpack compressed-tensors' MXFP6 into 7-bit integers, which are exactly its values.

A code has a sign and a magnitude of E2M3, whose values are multiples of 1/8 up to 60/8; a scale is a power of two. So
codes become 8 times their values, and scales an eighth of theirs, and the kernels of integers read them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import dtype_name
from ._bnb_codec import bad, require
from ._hub_codes import integers, packed
from ._hub_unpacked import Get, Size, Unpacked

if TYPE_CHECKING:
    from ..core import PrequantizedWeight

BITS, MIDDLE = 7, 64  # of the integers, and what is added to them
_GROUP = 32


def read_mxfp6(weight: PrequantizedWeight, bits: int, size: Size | None, get: Get) -> Unpacked:
    """Read a weight X: X.weight_packed, uint8 [out, in * 6 / 8], four codes in three bytes from the low bits on;
    X.weight_scale, E8M0 [out, in / 32].

    Raises:
        BadFileError: its tensors are no such ones, or a scale is not a number.
    """
    key, codes = require(weight, "codes", get)
    if codes.dtype != torch.uint8 or codes.ndim != 2 or not codes.numel() or codes.shape[1] % (_GROUP * 6 // 8):
        raise bad(key, f"it is {dtype_name(codes.dtype)} {list(codes.shape)}, which no codes of MXFP6 are")
    rows, groups = len(codes), codes.shape[1] * 8 // 6 // _GROUP
    key, scale = require(weight, "scale", get)
    if scale.dtype.itemsize != 1 or tuple(scale.shape) != (rows, groups):
        raise bad(key, f"it is {dtype_name(scale.dtype)} {list(scale.shape)}, but must be bytes {[rows, groups]}")
    exponents = scale.view(torch.uint8)
    if bool((exponents == 255).any()):
        raise bad(key, "a scale is not a number")
    values = _table().to(codes.device)[integers(codes, 6).int()]
    return Unpacked(codes=packed(values, BITS), scale=torch.exp2(exponents.double() - (127 + 3)).bfloat16())


@cache
def _table() -> Tensor:
    """Return 8 times the value of each code, and 64: uint8 [64]. OCP Microscaling Formats 1.0, section 5.3.2."""
    magnitudes = [number if number < 8 else (8 + number % 8) << (number // 8 - 1) for number in range(32)]
    values = [*magnitudes, *(-number for number in magnitudes)]
    return torch.tensor([MIDDLE + number for number in values], dtype=torch.uint8, device="cpu")

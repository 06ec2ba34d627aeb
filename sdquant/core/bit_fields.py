"""Unpack codes whose bits lie in the words of a unit, and pack them.

A code is the sum of its fields, (word, shift, mask): the word shifted right by `shift` bits (to the left where that is
negative), and masked.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..utils.device_constants import constant

Field = tuple[int, int, int]
Codes = tuple[tuple[Field, ...], ...]


def launches(device: torch.device) -> bool:
    """Return whether a device takes longer to begin an operator than for most of those here."""
    return device.type != "cpu"


@cache
def stream(bits: int) -> Codes:
    """Return the fields of 8 codes in `bits` bytes: one little-endian number, the first code in its low bits."""
    codes, most = [], (1 << bits) - 1
    for code in range(8):
        word, shift = divmod(code * bits, 8)
        low = min(8 - shift, bits)  # bits of it in the first of its bytes
        rest = ((word + 1, -low, most >> low << low),) if low < bits else ()
        codes.append(((word, shift, (1 << low) - 1), *rest))
    return tuple(codes)


def split(words: Tensor, shifts: tuple[int, ...], mask: int, dim: int) -> Tensor:
    """Return `words` shifted right and masked, for each of `shifts`, one beside the other along a new dimension."""
    if not launches(words.device):
        return torch.stack([(words >> shift if shift else words) & mask for shift in shifts], dim)
    return (words.unsqueeze(dim) >> _column(shifts, words.ndim - dim, words.dtype, words.device)) & mask


@constant
def _column(shifts: tuple[int, ...], after: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(shifts, dtype=dtype, device="cpu").view(-1, *[1] * after).to(device)


def unpack_units(units: Tensor, codes: Codes, dtype: torch.dtype) -> Tensor:
    """Unpack units [n, words], uint8 or int32, to codes [n, len(codes)] in `dtype`, which has to hold them exactly."""
    values = torch.empty((len(units), len(codes)), dtype=dtype, device=units.device)
    (_at_once if launches(units.device) else _one_by_one)(units, codes, values)
    return values


def _one_by_one(units: Tensor, codes: Codes, values: Tensor) -> None:
    """Use few temporaries: on a CPU this is up to seven times as fast as `_at_once`."""
    for column, fields in enumerate(codes):
        values[:, column] = sum(_field(units[:, word], shift, mask) for word, shift, mask in fields)


def _field(word: Tensor, shift: int, mask: int) -> Tensor:
    return ((word >> shift) if shift >= 0 else (word << -shift)) & mask


def _at_once(units: Tensor, codes: Codes, values: Tensor) -> None:
    """Use as many operators for all codes as for one: on a GPU each is a launch."""
    whole = _whole(codes)
    if whole:
        values[:, :whole] = units[:, :whole] & codes[0][0][2]
    if whole < len(codes):
        right, left, mask = _shifts(codes[whole:], units.shape[1], units.dtype, units.device)
        values[:, whole:] = (((units.unsqueeze(1) >> right) << left) & mask).sum(-1, dtype=values.dtype)


@cache
def _whole(codes: Codes) -> int:
    """Return how many of the first codes are the low bits of a word each."""
    mask = codes[0][0][2]
    return next((at for at, fields in enumerate(codes) if fields != ((at, 0, mask),)), len(codes))


def pack_units(values: Tensor, codes: Codes, words: int) -> Tensor:
    """Pack codes [n, len(codes)], uint8, to units [n, words], uint8: the inverse of `unpack_units`."""
    units = torch.zeros((len(values), words), dtype=torch.uint8, device=values.device)
    for column, fields in enumerate(codes):
        code = values[:, column]
        for word, shift, mask in fields:
            units[:, word] |= (code & mask) << shift if shift >= 0 else (code & mask) >> -shift
    return units


@constant
def _shifts(codes: Codes, words: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return shifts to the right and to the left, and masks, of each word for each code: [codes, words]."""
    right, left, mask = torch.zeros(3, len(codes), words, dtype=dtype, device="cpu")
    for code, fields in enumerate(codes):
        for word, shift, bits in fields:
            right[code, word], left[code, word], mask[code, word] = max(shift, 0), max(-shift, 0), bits
    return right.to(device), left.to(device), mask.to(device)

"""Products of quantized tensors. What is dequantized before the product and what after it: Qwix 0.1.8,
core/dot_general.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SettingsError
from . import float8, integers
from .qarray import QArray, broadcast, dequantize
from .qtypes import qtype
from .rounding import from_codes

# With smaller tiles along the sum, scaling every partial sum costs more than scaling the input does.
LEAST_TILE = 128


def linear(x: QArray | Tensor, weight: QArray | Tensor) -> Tensor:
    """x [..., K] times weight [N, K] transposed: [..., N].

    Both quantized, to integers or float8, in tiles of LEAST_TILE at least (or none): the codes are multiplied, integers
    in exact sums, and the sums scaled. Else both are dequantized first, and the product is that of floats.

    Raises:
        SettingsError: both have zero points, or tiles of different sizes.
    """
    if not (isinstance(x, QArray) and isinstance(weight, QArray) and scales_after(x) and scales_after(weight)):
        left = dequantize(x) if isinstance(x, QArray) else x
        right = dequantize(weight) if isinstance(weight, QArray) else weight
        return left @ right.to(left.dtype).T
    refuse_two_zero_points(x, weight)
    return _of_codes(x, weight)


def refuse_two_zero_points(x: QArray, weight: QArray) -> None:
    """Raises SettingsError if both have zero points."""
    if x.zero_point is not None and weight.zero_point is not None:
        raise SettingsError(
            "Activations and weights were both to be quantized with a zero point",
            "the product would need sums that nobody has",
            'Use "absmax" for one of them',
        )


def scales_after(array: QArray) -> bool:
    """Whether its scales can be applied to sums of codes."""
    size, count = array.qvalue.shape[-1], array.scale.shape[-1]
    return qtype(array.qtype).kind in ("int", "float") and (count == 1 or size // count >= LEAST_TILE)


def common_tiles(x: QArray, other: QArray, what: str) -> int:
    """How many tiles the sums of a product are made in: those of either operand, or of both.

    Args:
        what: the other operand is, for the error.

    Raises:
        SettingsError: both have tiles, of different sizes.
    """
    size, counts = x.qvalue.shape[-1], [array.scale.shape[-1] for array in (x, other)]
    if min(counts) > 1 and counts[0] != counts[1]:
        raise SettingsError(
            f"Activations in tiles of {size // counts[0]} were to meet {what} in tiles of {size // counts[1]}",
            "a sum has one scale on either side",
            "Give both the same tile_size",
        )
    return max(counts)


def _of_codes(x: QArray, weight: QArray) -> Tensor:
    size, tiles = x.qvalue.shape[-1], common_tiles(x, weight, "weights")
    lead, rows, step = x.qvalue.shape[:-1], weight.qvalue.shape[0], size // tiles
    left, right = x.qvalue.reshape(-1, tiles, step), weight.qvalue.reshape(rows, tiles, step)
    each = [sums_of_codes(left[:, n], right[:, n], x.qtype, weight.qtype) for n in range(tiles)]
    sums = torch.stack(each, -1) if tiles > 1 else each[0][..., None]  # not copied: it is as large as the result
    if x.zero_point is not None:
        zero = _codes_of_zero(x.zero_point, x.qvalue.shape, tiles)
        part = [
            sums_of_codes(zero[:, n, None].expand(-1, step), right[:, n], x.qtype, weight.qtype) for n in range(tiles)
        ]
        sums = sums - torch.stack(part, -1)
    if weight.zero_point is not None:
        zero = _codes_of_zero(weight.zero_point, weight.qvalue.shape, tiles)
        part = [
            sums_of_codes(left[:, n], zero[:, n, None].expand(-1, step), x.qtype, weight.qtype) for n in range(tiles)
        ]
        sums = sums - torch.stack(part, -1)
    # The sum is rounded to the scales' dtype before it is scaled, and scaled by one side after the other.
    scaled = sums.to(x.scale.dtype).mul_(_expanded(x.scale, lead)[:, None, :])
    scaled = scaled.mul_(_expanded(weight.scale, weight.qvalue.shape[:1])[None])
    done = scaled.sum(-1) if tiles > 1 else scaled[..., 0]
    return done.to(x.dtype).reshape(*lead, rows)


def _expanded(scale: Tensor, lead: torch.Size) -> Tensor:
    """[rows, tiles or 1] of a scale each of whose leading axes may be of size 1."""
    return scale.expand(*lead, scale.shape[-1]).reshape(-1, scale.shape[-1])


def _codes_of_zero(zero_point: Tensor, shape: torch.Size, tiles: int) -> Tensor:
    """[rows, tiles] of a zero point that may be shared."""
    wide = broadcast(torch.add, zero_point.new_zeros((*shape[:-1], tiles)), zero_point)
    return wide.reshape(-1, tiles)


def sums_of_codes(left: Tensor, right: Tensor, left_type: str, right_type: str) -> Tensor:
    """left [M, K] times right [N, K] transposed: exact integers of integers, else float32."""
    rows = qtype(left_type), qtype(right_type)
    if all(row.kind == "int" for row in rows):
        return integers.product(left, right)
    if left.is_floating_point() and right.is_floating_point() and left.itemsize == right.itemsize == 1:
        return float8.product(left, right)
    floats = [from_codes(codes, row, torch.float32) for codes, row in zip((left, right), rows, strict=True)]
    with torch.autocast(left.device.type, enabled=False):
        return floats[0] @ floats[1].T

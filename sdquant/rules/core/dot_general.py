"""Products of quantized tensors. What is dequantized before the product, and what after it, follows Qwix at aa623acb,
core/dot_general.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import SettingsError
from ...kernels import int_matmul
from . import float8
from .numerics import from_codes
from .qarray import QArray, broadcast, floats
from .qtypes import qtype

# With smaller tiles along the sum, scaling every partial sum costs more than scaling the input does.
LEAST_TILE = 128


def linear(x: QArray | Tensor, weight: QArray | Tensor) -> Tensor:
    """Multiply x [..., K] by weight [N, K] transposed: [..., N].

    Both quantized, to integers or float8, in tiles of LEAST_TILE at least (or none): the codes are multiplied, integers
    in exact sums, and the sums scaled. Else both are dequantized first, and the product is that of floats.

    Raises:
        SettingsError: both have zero points, or tiles of different sizes.
    """
    if not (isinstance(x, QArray) and isinstance(weight, QArray) and scales_after(x) and scales_after(weight)):
        left, right = floats(x), floats(weight)
        return left @ right.to(left.dtype).T
    refuse_two_zero_points(x, weight)
    return _of_codes(x, weight)


def refuse_two_zero_points(x: QArray, weight: QArray) -> None:
    """Raise SettingsError if both have zero points."""
    if x.zero_point is not None and weight.zero_point is not None:
        raise SettingsError(
            "Cannot multiply activations and weights that both have a zero point",
            "only one side of a product can have one",
            'Use the calibration method "absmax" for one of them',
        )


def scales_after(array: QArray) -> bool:
    """Return whether its scales can be applied to sums of codes, after the GEMM."""
    size, count = array.qvalue.shape[-1], array.scale.shape[-1]
    return qtype(array.qtype).kind in ("int", "float") and (count == 1 or size // count >= LEAST_TILE)


def common_tiles(x: QArray, other: QArray, what: str) -> int:
    """Return the number of tiles along the sum of a product: those of either operand, or of both.

    Args:
        what: name of the other operand, for the error.

    Raises:
        SettingsError: both have tiles, of different sizes.
    """
    size, counts = x.qvalue.shape[-1], [array.scale.shape[-1] for array in (x, other)]
    if min(counts) > 1 and counts[0] != counts[1]:
        raise SettingsError(
            f"Cannot multiply activations in tiles of {size // counts[0]} by {what} in tiles of {size // counts[1]}",
            "both must have the same tiles along the summed axis",
            "Give both the same tile_size",
        )
    return max(counts)


def _of_codes(x: QArray, weight: QArray) -> Tensor:
    size, tiles = x.qvalue.shape[-1], common_tiles(x, weight, "weights")
    lead, rows, step = x.qvalue.shape[:-1], weight.qvalue.shape[0], size // tiles
    left, right = x.qvalue.reshape(-1, tiles, step), weight.qvalue.reshape(rows, tiles, step)
    scales = [_expanded(x.scale, lead, tiles), _expanded(weight.scale, weight.qvalue.shape[:1], tiles)]
    of_x, of_weight = (
        None if array.zero_point is None else zeros(array, tiles).reshape(-1, tiles) for array in (x, weight)
    )
    done: Tensor | None = None
    for n in range(tiles):
        one, other = left[:, n], right[:, n]
        sums = sums_of_codes(one, other, x.qtype, weight.qtype)
        if of_x is not None:
            sums = sums - sums_of_codes(of_x[:, n, None].expand(-1, step), other, x.qtype, weight.qtype)
        if of_weight is not None:
            sums = sums - sums_of_codes(one, of_weight[:, n, None].expand(-1, step), x.qtype, weight.qtype)
        # The sum is rounded to the scales' dtype before it is scaled, and scaled by one side after the other.
        scaled = sums.to(x.scale.dtype).mul_(scales[0][:, n, None]).mul_(scales[1][None, :, n])
        if tiles > 1:  # added in order, as the kernels do (`forms.Activations`)
            scaled = scaled.to(torch.promote_types(scaled.dtype, torch.float32))
            scaled = scaled if done is None else done.add_(scaled)
        done = scaled
    assert done is not None
    return done.to(x.scale.dtype).to(x.dtype).reshape(*lead, rows)


def _expanded(scale: Tensor, lead: torch.Size, tiles: int) -> Tensor:
    """Expand a scale, whose axes may be of size 1, to [rows, tiles]."""
    return scale.expand(*lead, tiles).reshape(-1, tiles)


def zeros(array: QArray, tiles: int) -> Tensor:
    """Expand a zero point, which rows or tiles may share, to [..., rows, tiles]."""
    assert array.zero_point is not None
    rows = array.zero_point.new_zeros((*array.qvalue.shape[:-1], tiles))
    return broadcast(torch.add, rows, array.zero_point)


def sums_of_codes(left: Tensor, right: Tensor, left_type: str, right_type: str) -> Tensor:
    """Multiply codes left [M, K] by right [N, K] transposed: exact integers if both are integers, else float32."""
    rows = qtype(left_type), qtype(right_type)
    if all(row.kind == "int" for row in rows):
        return int_matmul.product(left, right)
    if left.is_floating_point() and right.is_floating_point() and left.itemsize == right.itemsize == 1:
        return float8.product(left, right)
    numbers = [from_codes(codes, row, torch.float32) for codes, row in zip((left, right), rows, strict=True)]
    with torch.autocast(left.device.type, enabled=False):
        return numbers[0] @ numbers[1].T

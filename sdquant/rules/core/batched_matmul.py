"""Batched products of two quantized activations: `dot_general.linear` with leading axes.

What is dequantized before the product, and what after it, follows Qwix at aa623acb, core/dot_general.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import SettingsError
from ...kernels import int_matmul
from ...utils.autocast import is_autocast_on
from .dot_general import common_tiles, scales_after, zeros
from .numerics import from_codes
from .qarray import QArray, dequantize
from .qtypes import QType, qtype

# Sums below this are exact in float32, whatever the order of the additions.
EXACT_IN_FLOAT32 = 2**24
# Multiplications in one matrix product from which the integer kernel is faster than all matrices at once in float32
# (measured on two cores with VNNI: 16 x [16, 16, 16] 20 times slower, 16 x [256, 64, 256] 4 times faster).
WORTH_A_KERNEL = 2**17


def multiply(a: QArray, b: QArray, *, right_first: bool = False) -> Tensor:
    """Multiply a [..., M, K] by b [..., K, N], in the dtype of the original tensors; leading axes broadcast.

    Both in integers or float8, in tiles of at least `dot_general.LEAST_TILE` along K (or none): codes are multiplied,
    integers exactly, and the sums scaled. Else both are dequantized first, and multiplied as floats.

    Args:
        right_first: whether the sums are scaled by b's scales before a's, each time rounded. That is so in Qwix's
            einsum: opt_einsum hands over the two operands of any equation in the order (1, 0).

    Raises:
        SettingsError: both have zero points, or tiles of different sizes.
    """
    with plain_precision(a.qvalue):
        right = turned(b)
        if not (scales_after(a) and scales_after(right)):
            return dequantize(a) @ dequantize(b)
        if a.zero_point is not None and right.zero_point is not None:
            raise SettingsError(
                "Cannot multiply two activations that both have a zero point",
                "only one side of a product can have one",
                'Use a symmetric calibration method such as "absmax" in rules that name products',
            )
        return _of_codes(a, right, right_first=right_first)


def turned(array: QArray) -> QArray:
    """Exchange the last two axes."""
    zero = array.zero_point
    return replace(
        array, qvalue=array.qvalue.mT, scale=array.scale.mT, zero_point=None if zero is None else zero.mT
    )  # fmt: skip


def _of_codes(a: QArray, b: QArray, *, right_first: bool) -> Tensor:
    """Multiply codes of a [..., M, K] by those of b [..., N, K] transposed, then scale."""
    tiles = common_tiles(a, b, "activations")
    left, right = _in_tiles(a.qvalue, tiles), _in_tiles(b.qvalue, tiles)
    sums = _sums(left, right, qtype(a.qtype), qtype(b.qtype))
    for array, other, turn in ((a, right, False), (b, left, True)):
        if array.zero_point is not None:
            part = _in_tiles(zeros(array, tiles), tiles).long() * other.sum(-1, dtype=torch.int64).unsqueeze(-2)
            sums = sums.long() - (part.mT if turn else part)
    # The sum is rounded to the scales' dtype before it is scaled, and scaled by one side after the other.
    scales = _over_sums(a.scale, -1), _over_sums(b.scale, -2)
    done = sums.to(a.scale.dtype) * scales[right_first]
    done *= scales[not right_first]
    return (done.sum(-3) if tiles > 1 else done.squeeze(-3)).to(a.dtype)


def _in_tiles(codes: Tensor, tiles: int) -> Tensor:
    """Reshape [..., rows, K] to [..., tiles, rows, K / tiles]."""
    return codes.reshape(*codes.shape[:-1], tiles, codes.shape[-1] // tiles).transpose(-3, -2)


def _over_sums(scale: Tensor, axis: int) -> Tensor:
    """Reshape [..., rows, tiles] to [..., tiles, rows, 1] for axis -1, to [..., tiles, 1, rows] for -2."""
    return scale.mT.unsqueeze(axis)


def _sums(left: Tensor, right: Tensor, left_row: QType, right_row: QType) -> Tensor:
    """Multiply codes left [..., M, K] by right [..., N, K] transposed: exact if both are integers, else in float32."""
    if not left_row.kind == right_row.kind == "int":
        floats = [from_codes(codes, row, torch.float32) for codes, row in ((left, left_row), (right, right_row))]
        return floats[0] @ floats[1].mT
    rows, columns, size = left.shape[-2], right.shape[-2], left.shape[-1]
    if rows * columns * size >= WORTH_A_KERNEL and left.dtype == right.dtype == torch.int8:
        return _one_by_one(left, right)
    largest = left_row.limits[0] * right_row.limits[0] * size
    dtype = torch.float32 if largest <= EXACT_IN_FLOAT32 else torch.float64
    if dtype == torch.float64 and not int_matmul.has_float64(left.device):
        return _one_by_one(left, right)
    return left.to(dtype) @ right.to(dtype).mT


def _one_by_one(left: Tensor, right: Tensor) -> Tensor:
    """Do the same with the integer GEMM of linear layers, one pair of matrices at a time."""
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    flat = [codes.expand(*lead, *codes.shape[-2:]).flatten(0, -3) for codes in (left, right)]
    done = [int_matmul.product(one, other) for one, other in zip(*flat, strict=True)]
    return torch.stack(done).reshape(*lead, *done[0].shape)


@contextmanager
def plain_precision(like: Tensor) -> Iterator[None]:
    """Disable autocast, which would round sums of codes to bfloat16."""
    if not is_autocast_on(like.device.type):
        yield
        return
    with torch.autocast(like.device.type, enabled=False):
        yield

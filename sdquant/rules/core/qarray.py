"""A quantized tensor: codes, scales and zero points, each scale for a tile of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core import dtype_name, torch_dtypes
from ...errors import SettingsError
from .calibration import calibrate, scale_and_zero_point
from .how_to_quantize import HowToQuantize, scale_shape, tile_sizes
from .numerics import from_codes, to_codes
from .qtypes import qtype

Find = Callable[[Tensor, HowToQuantize], Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class QArray:
    """A quantized tensor: its values are (codes - zero_point) * scale.

    Attributes:
        qvalue: codes, of the tensor's shape. scale: of the same rank, each size a divisor of the tensor's.
        zero_point: codes of the scale's shape; None if symmetric.
        dtype: of the tensor that was quantized, and of what is dequantized.
    """

    qvalue: Tensor
    scale: Tensor
    zero_point: Tensor | None
    qtype: str
    dtype: torch.dtype


def range_of(x: Tensor, how: HowToQuantize) -> dict[str, Tensor]:
    """Return the range of a tensor: {"absmax"} or {"min", "max"}, shaped like its scales; float32 for float16."""
    sizes = tile_sizes(x.shape, how)
    split: list[int] = []
    reduced: list[int] = []
    for axis, size in enumerate(x.shape):
        if axis in sizes:
            split += [size // sizes[axis], sizes[axis]]
        else:
            split.append(size)
        if axis not in how.channelwise_axes:
            reduced.append(len(split) - 1)
    return calibrate(_computed_in(x).reshape(split), reduced, scale_shape(x.shape, how), how.method)


def quantize(x: Tensor, how: HowToQuantize, find: Find = range_of) -> QArray:
    """Quantize a tensor with its own range.

    Args:
        find: finds the range, as `range_of` does.

    Raises:
        SettingsError: not a float tensor, or tiles that do not divide it.
    """
    if x.dtype not in torch_dtypes.FLOATS:
        raise SettingsError(
            f"Cannot quantize a tensor of {dtype_name(x.dtype)}",
            "only float64, float32, bfloat16 and float16 can be quantized",
            "Exclude it from the rules",
        )
    scale, zero_point = scale_and_zero_point(find(x, how), how.row)
    return quantize_with(x, how.qtype, scale, zero_point, how.noise)


def quantize_with(
    x: Tensor,
    qtype_name: str,
    scale: Tensor,
    zero_point: Tensor | None,
    noise: Callable[[torch.Size], Tensor] | None = None,
) -> QArray:
    """Quantize a tensor with known scales. float16 tensors are divided in float32."""
    row, values = qtype(qtype_name), _computed_in(x)
    scale = scale.to(values.dtype)
    units = broadcast(torch.div, values, scale)
    if zero_point is not None:
        units = broadcast(torch.add, units, zero_point.to(units.dtype))
    codes = to_codes(units, row, noise)
    return QArray(qvalue=codes, scale=scale, zero_point=zero_point, qtype=row.name, dtype=x.dtype)


def dequantize(array: QArray) -> Tensor:
    """Dequantize a tensor to its original dtype."""
    return values(array).to(array.dtype)


def floats(operand: QArray | Tensor) -> Tensor:
    """Dequantize an operand, if it is quantized."""
    return dequantize(operand) if isinstance(operand, QArray) else operand


def values(array: QArray) -> Tensor:
    """Dequantize a tensor to the dtype of its scales."""
    numbers = from_codes(array.qvalue, qtype(array.qtype), array.scale.dtype)
    if array.zero_point is not None:
        numbers = broadcast(torch.sub, numbers, array.zero_point.to(numbers.dtype))
    return broadcast(torch.mul, numbers, array.scale)


def broadcast(operation: Callable[[Tensor, Tensor], Tensor], x: Tensor, small: Tensor) -> Tensor:
    """Apply an elementwise operation to x and a tensor of the same rank with one number for each tile of x."""
    wide: list[int] = []
    narrow: list[int] = []
    for size, count in zip(x.shape, small.shape, strict=True):
        if count in (1, size):
            wide.append(size)
            narrow.append(count)
        else:
            wide += [count, size // count]
            narrow += [count, 1]
    return operation(x.reshape(wide), small.reshape(narrow)).reshape(x.shape)


def _computed_in(x: Tensor) -> Tensor:
    """Return x, float16 as float32: scales of ordinary weights in float16 would be too small and become 1."""
    return x.float() if x.dtype == torch.float16 else x

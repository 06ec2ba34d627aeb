"""Calibration: the range of a tensor by a method, and the scale and zero point that follow from it.

Formulas: Qwix at aa623acb, core/qarray.py, `calibrate` and `compute_scale_zero_point`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import SettingsError
from ...utils.tensors import divided
from .numerics import to_codes
from .qtypes import QType, qtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .calibration_method import CalibrationMethod

_EXPONENT = 0x7F80  # the bits of a bfloat16's exponent


def calibrate(tiles: Tensor, axes: Sequence[int], shape: Sequence[int], how: CalibrationMethod) -> dict[str, Tensor]:
    """Return the range: {"absmax"}, or {"min", "max"}, each of shape `shape` (all ones for "fixed").

    Args:
        tiles: the tensor, its tiled axes split in two (number of tiles, size of a tile).
        axes: of `tiles`, that are reduced.
        shape: of the scale.
    """
    numbers = how.numbers
    if how.name == "fixed":
        low, high = numbers
        ones = [1] * len(shape)
        if low + high == 0:
            return {"absmax": tiles.new_full(ones, high)}
        return {"min": tiles.new_full(ones, low), "max": tiles.new_full(ones, high)}
    axes = list(axes)
    if how.name == "minmax":
        low_end = (tiles.amin(axes, keepdim=True) if axes else tiles).clamp(max=0)
        high_end = (tiles.amax(axes, keepdim=True) if axes else tiles).clamp(min=0)
        if numbers:
            low_end, high_end = _times(low_end, numbers[0]), _times(high_end, numbers[0])
        return {"min": low_end.reshape(list(shape)), "max": high_end.reshape(list(shape))}
    if how.name == "absmax":
        absmax = tiles.abs().amax(axes, keepdim=True) if axes else tiles.abs()
        return {"absmax": (_times(absmax, numbers[0]) if numbers else absmax).reshape(list(shape))}
    squares = tiles.square()
    mean = squares.mean(axes, keepdim=True) if axes else squares
    return {"absmax": _times(mean.sqrt(), numbers[0]).reshape(list(shape))}


def _times(values: Tensor, factor: float) -> Tensor:
    """Multiply a range by a factor, which is rounded to the dtype first, as in JAX; torch would multiply in float32."""
    return values * values.new_tensor(factor)


def scale_and_zero_point(limits: Mapping[str, Tensor], row: QType) -> tuple[Tensor, Tensor | None]:
    """Return the scale of a range, and the zero point if the range is asymmetric.

    A scale below the square root of the dtype's smallest normal number becomes 1: the codes are zero then.

    Raises:
        SettingsError: an asymmetric range for a type without zero points.
    """
    if "absmax" in limits:
        return _rounded(_not_tiny(divided(limits["absmax"], row.bound)), row), None
    if not row.asymmetric:
        raise SettingsError(
            f"Cannot use an asymmetric range for {row.name}",
            "only int4, int8 and int16 have a zero point",
            'Use the calibration method "absmax", or one of these types',
        )
    low, high = row.limits
    scale = _not_tiny(divided(limits["max"] - limits["min"], high - low))
    return scale, to_codes(low - limits["min"] / scale, row)


def _not_tiny(scale: Tensor) -> Tensor:
    # On the CPU by name: transformers calls this while tensors without a device are made on the meta device.
    threshold = torch.tensor(torch.finfo(scale.dtype).tiny, dtype=scale.dtype, device="cpu").sqrt()
    return torch.where(scale < threshold.to(scale.device), torch.ones_like(scale), scale)


def _rounded(scale: Tensor, row: QType) -> Tensor:
    """Round the scale to the type that the format stores scales in."""
    if row.scale_type == "power of two" and row.bias is not None:
        # Down to a power of two by dropping the mantissa of a bfloat16, to which the product is rounded before.
        biased = (scale * scale.new_tensor(row.bias)).to(torch.bfloat16)
        return (biased.view(torch.int16) & _EXPONENT).view(torch.bfloat16).to(scale.dtype)
    if row.scale_type == "power of two":
        return torch.exp2(torch.ceil(torch.log2(scale))).to(scale.dtype)
    if row.scale_type:
        return to_codes(scale, qtype(row.scale_type)).to(scale.dtype)
    return scale

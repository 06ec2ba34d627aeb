"""Operands saved for the backward pass, and gradients of clipped operands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.calibration import scale_and_zero_point
from ..core.calibration_method import method
from ..core.qarray import QArray, broadcast, quantize_with
from ..core.qtypes import qtype

if TYPE_CHECKING:
    from ..qconfig import QtRule

Range = dict[str, Tensor]


@dataclass(frozen=True)
class Operand:
    """An operand of a product, before it is quantized.

    Attributes:
        qtype: None leaves it float.
        method: the calibration method of its range. found: its range, shaped like its scales.
    """

    qtype: str | None
    method: str = "absmax"
    found: Range | None = None

    def quantized(self, x: Tensor) -> QArray | Tensor:
        """Quantize the operand."""
        if self.qtype is None:
            return x
        assert self.found is not None
        scale, zero_point = scale_and_zero_point(self.found, qtype(self.qtype))
        return quantize_with(x, self.qtype, scale, zero_point)

    @property
    def clips(self) -> bool:
        """Return whether its range may be narrower than its values, so that gradients are zero outside of it."""
        if self.qtype is None:
            return False
        how = method(self.method)
        return not (how.name in ("absmax", "minmax") and (not how.numbers or how.numbers[0] >= 1))

    def clipped(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Zero the operand's gradient where the operand lies outside its range."""
        if not self.clips:
            return gradient
        assert self.found is not None
        high = self.found["max"] if "max" in self.found else self.found["absmax"]
        low = self.found.get("min", -high)
        inside = broadcast(torch.ge, x, low) & broadcast(torch.le, x, high)
        return torch.where(inside, gradient, torch.zeros_like(gradient))


@dataclass(frozen=True)
class QtOperands:
    """How the two operands of a layer's product are quantized, and its gradients.

    Attributes:
        generator: of stochastic rounding; None is torch's own.
    """

    rule: QtRule
    x: Operand
    weight: Operand
    generator: torch.Generator | None = None


def usable(array: QArray | Tensor, axis: int | None) -> bool:
    """Return whether gradients can be multiplied by its codes: no tiles along `axis`, which the forward sums over."""
    if not isinstance(array, QArray) or qtype(array.qtype).tile is not None:
        return False
    return axis is None or array.scale.shape[axis] == 1


def units(array: QArray) -> QArray:
    """Return the array with scales of 1 and no zero point, for when its scales are multiplied into the gradient."""
    return replace(without_zero_point(array), scale=array.scale.new_ones([1] * array.scale.ndim))


def without_zero_point(array: QArray) -> QArray:
    """Subtract zero points from the codes, as int16: the differences need one bit more than the type has."""
    if array.zero_point is None:
        return array
    codes = broadcast(torch.sub, array.qvalue.int(), array.zero_point.int())
    return replace(array, qvalue=codes, zero_point=None, qtype="int16")


class Keeper:
    """Tensors and quantized tensors for `ctx.save_for_backward`, where checkpointing and offloading can hook them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor | None] = []
        self._kept: dict[str, Any] = {}

    def keep(self, name: str, value: QArray | Tensor | None) -> None:
        """Save a value; a QArray as its three tensors."""
        if isinstance(value, QArray):
            self._kept[name] = (len(self.tensors), (value.qtype, value.dtype))
            self.tensors += [value.qvalue, value.scale, value.zero_point]
        else:
            self._kept[name] = (len(self.tensors), None)
            self.tensors.append(value)

    def get(self, name: str, saved: tuple[Tensor | None, ...]) -> Any:
        """Restore a value from `ctx.saved_tensors`."""
        start, kind = self._kept[name]
        if kind is None:
            return saved[start]
        codes, scale, zero_point = saved[start : start + 3]
        assert codes is not None and scale is not None
        return QArray(qvalue=codes, scale=scale, zero_point=zero_point, qtype=kind[0], dtype=kind[1])

"""Weights whose 8-bit codes are multiplied as they are stored, with one scale for a row or for several rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .workspace import scratch

_SHIFT = 128  # what uint8 codes are less by as int8


@dataclass(frozen=True)
class RowCodes:
    """Codes with their scales and zero points.

    Attributes:
        codes: int8 or uint8 [rows, columns]. scale: of any float dtype; None for ones. factor: of all scales.
        zero: what is subtracted from the codes: a number, or integers of any dtype.
    """

    codes: Tensor
    scale: Tensor | None
    factor: float = 1.0
    zero: Tensor | int = 0

    @property
    def shift(self) -> int:
        """Return what the codes are less by when they are multiplied as int8."""
        return _SHIFT if self.codes.dtype == torch.uint8 else 0

    @property
    def shifted(self) -> bool:
        """Return whether results depend on the sums of the activations' codes."""
        return isinstance(self.zero, Tensor) or self.zero != self.shift

    def signed(self) -> Tensor:
        """Return the codes as int8, less by `shift`. They may be in the workspace."""
        if not self.shift:
            return self.codes
        out = scratch(tuple(self.codes.shape), torch.int8, self.codes.device)
        return torch.bitwise_xor(self.codes.view(torch.int8), -_SHIFT, out=out)

    def scales(self) -> Tensor:
        """Return the scale of each row, float32 [rows]."""
        scale = self.codes.new_ones(1) if self.scale is None else self.scale.flatten()
        wide = scale.to(torch.float32)
        return spread(wide if self.factor == 1.0 else wide * self.factor, len(self.codes))

    def added(self) -> Tensor | int:
        """Return what is added to each of the `signed` codes: an int32 number per row, or one for all."""
        if isinstance(self.zero, Tensor):
            return self.shift - spread(self.zero.flatten().to(torch.int32), len(self.codes))
        return self.shift - self.zero


def spread(each: Tensor, rows: int) -> Tensor:
    """Repeat numbers that are each for several rows, so that there is one for each of `rows`."""
    return each if len(each) == rows else each.repeat_interleave(rows // len(each))

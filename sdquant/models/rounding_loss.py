"""The error that weights get when they are quantized a second time, from one format to another."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import Packed


class RoundingLoss:
    """Collects the signal-to-noise ratio of each weight against the values that it had in its first format.

    Attributes:
        ratios: in dB, of the weights that have changed. identical: number of those that have not.
        from_zeros: number of those that had only zeros, and have other values now.
        endless: number of those that have values in one of the formats that are not finite, or too large to compare.
    """

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self.identical = self.from_zeros = self.endless = 0

    def add(self, weight: Tensor, packed: Packed) -> None:
        """Compare a weight of the first format, float [out, in...], with itself in the second one."""
        import torch

        codec = packed.spec.scheme.codec
        self.compare(weight, codec.decode(codec.for_files(packed), torch.float32))

    def compare(self, weight: Tensor, decoded: Tensor) -> None:
        """Do the same with the dequantized weight, float32, which is overwritten."""
        import torch

        signal = float(torch.linalg.vector_norm(weight, dtype=torch.float32))
        noise = float(torch.linalg.vector_norm(decoded.sub_(weight.to(decoded.device))))
        if not math.isfinite(signal) or not math.isfinite(noise):
            self.endless += 1
        elif noise == 0:
            self.identical += 1
        elif signal == 0:
            self.from_zeros += 1
        else:
            self.ratios.append(20 * math.log10(signal / noise))

    def __str__(self) -> str:
        """Return it as a sentence; "" if no weight was compared."""
        count = len(self.ratios) + self.identical + self.from_zeros + self.endless
        if not count:
            return ""
        notes = f" {self.from_zeros} weights of zeros have other values now." if self.from_zeros else ""
        if self.endless:
            notes += f" {self.endless} weights have values that are not finite, or too large: do not use the result."
        if not self.ratios:
            return f"The second rounding changed {self.from_zeros + self.endless or 'none'} of {count} weights.{notes}"
        same = f"; {self.identical} are unchanged" if self.identical else ""
        return (
            f"The second rounding left an SNR of {fmean(self.ratios):.1f} dB against the weights of the first format "
            f"(mean of {len(self.ratios)} weights, the least {min(self.ratios):.1f} dB{same}).{notes}"
        )

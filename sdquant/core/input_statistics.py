"""What calibration has found about the inputs of a weight, for those who quantize it. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class InputStatistics:
    """Base of `QuantSpec`: there are none."""

    def magnitudes(self, inputs: int) -> Tensor | None:
        """Return the largest magnitudes of each input that calibration measured, on average: [inputs]; None without."""
        return None

    def second_moments(self, inputs: int) -> Tensor | None:
        """Return the means of the products of two inputs that calibration measured, float32; None without.

        Args:
            inputs: columns of `weight.flatten(1)`.

        Returns:
            [blocks, b, b]: the blocks along the diagonal of E[x x^T], where x is what a row of `weight.flatten(1)` is
            multiplied with, for a convolution a patch of its input. One block for all inputs, or of b inputs each, the
            last one filled up with zeros; b = 1 is the diagonal alone. The caller may change them.
        """
        return None

    def mean_input(self, inputs: int) -> Tensor | None:
        """Return the mean of each input that calibration measured, float32 [inputs]; None without.

        Args:
            inputs: columns of `weight.flatten(1)`.
        """
        return None

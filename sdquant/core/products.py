"""Products with packed weights: what a convolution needs to know, and a product as a floating-point GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Parameters of a convolution, one number per spatial dimension. For padding modes other than zeros the input is
    already padded.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True, kw_only=True)
class FloatGemm:
    """`Backend.linear` or `convolve` expressed as a floating-point GEMM.

    Attributes:
        x: replaces the activations.
        scales: factors of the product, applied one after another, each result rounded to the dtype of x. If there are
            any, x is multiplied by the codes of the weight as numbers, else by the dequantized weight.
    """

    x: Tensor
    scales: tuple[Tensor, ...] = ()

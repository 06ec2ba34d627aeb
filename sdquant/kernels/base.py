"""The interface of a kernel library, which reads some packed layouts faster than plain torch does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..core import LowRank, PackedLayout


Parts = Mapping[str, "Tensor"]
# Of activations [..., columns] and a layer's parameters: the product [..., rows], or None where it cannot.
Prepared = Callable[["Tensor", "Mapping[str, Tensor | None]"], "Tensor | None"]


class Reader(ABC):
    """Kernels of one kind (C for the CPU, Triton for GPUs). Its methods get contiguous tensors of one device.

    `dispatch` checks everything that a reader does against the backend's own decoding at first use, so a reader need
    not detect machines that compute wrong results; but it must say what it cannot do.
    """

    name: ClassVar[str]

    @abstractmethod
    def reads(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> bool:
        """Return whether it can dequantize a weight to `dtype` (float32, bfloat16, float16) on the parts' device."""

    def wants_apart(self, form: PackedLayout) -> bool:
        """Return whether it reads such GGUF blocks faster with their fields apart (struct of arrays)."""
        return False

    @abstractmethod
    def decode_into(self, form: PackedLayout, parts: Parts, out: Tensor) -> None:
        """Dequantize the weight into `out`, contiguous [rows, columns], bit-equal to the backend's own decoding."""

    def prepared_with_branch(
        self,
        form: PackedLayout,
        parts: Parts,
        branch: LowRank,
        of: Parts,
        dtype: torch.dtype,
        prefix: str,
        few: int,
        eight: EightBit | None,
        rotation: int,
    ) -> Prepared | None:
        """Return the product with a weight that has a low-rank branch, as `prepared`, which divides or rotates the
        activations and adds the branch itself; None if it has no such thing. What it leaves is done by parts.

        Args:
            form, parts: of the residual. of: the parts that `branch` names. few: up to how many rows the packed weight
                is multiplied, and on a CPU all of them without `eight`.
        """
        return None

    def rows_into(self, form: PackedLayout, parts: Parts, start: int, stop: int, out: Tensor) -> bool:
        """Dequantize rows start to stop as `decode_into` does, into `out`, contiguous [stop - start, columns]. Return
        False, and do nothing, if it cannot."""
        return False

    def rounded(self, form: PackedLayout, parts: Parts, dtype: torch.dtype, start: int, stop: int, out: Tensor) -> bool:
        """Do as `rows_into`, with the values that `decode_into` gives for `dtype`, stored as float32."""
        return False

    def few(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> int:
        """Return up to how many rows of activations of `dtype` `product` is the faster way; 0 if it never is."""
        return 0

    def most(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> int:
        """Return up to how many rows it may be the faster way, which is found by measuring: at least `few`."""
        return self.few(form, parts, dtype)

    def few_patches(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> int:
        """Return the same for patches of images, where the alternative is torch's convolution."""
        return self.few(form, parts, dtype)

    def product(self, form: PackedLayout, parts: Parts, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Multiply x [m, columns] by the transposed weight and add the bias [rows], into `out` [m, rows]; all of one
        dtype. Sums are in float32 and rounded once.

        The weight has the values that `decode_into` gives for the dtype of x, unless `unrounded`.
        """
        raise NotImplementedError(self.name)

    def unrounded(self, form: PackedLayout, parts: Parts, dtype: torch.dtype) -> bool:
        """Return whether `product` uses the weight in float32, rounded neither to the dtype of x nor before."""
        return False

    def prepared(
        self,
        form: PackedLayout,
        parts: Parts,
        dtype: torch.dtype,
        few: int,
        prefix: str,
        eight: EightBit | None,
    ) -> Prepared | None:
        """Return the product for the layers that hold such a weight, with every lookup done in advance; None if it has
        no such thing.

        Args:
            few: up to how many rows `product` is used; a reader may prepare more rows in another way.
            prefix: of the parts' names among a layer's parameters.
            eight: the product in 8 bits, if the layer has one.
        """
        return None

    def prepared_convolution(
        self, form: PackedLayout, parts: Parts, dtype: torch.dtype, prefix: str, shape: tuple[int, ...],
        run: Callable[..., Tensor],
    ) -> Callable[..., Tensor | None] | None:  # fmt: skip
        """Return a function of x and a layer that holds a weight of `shape`, which `run` convolves with when it is
        decoded; None if the reader has no such thing."""
        return None

    def prepared_with_rotation(
        self,
        form: PackedLayout,
        parts: Parts,
        dtype: torch.dtype,
        few: int,
        prefix: str,
        eight: EightBit | None,
        rotation: int,
    ) -> Prepared | None:
        """Return the product that rotates activations itself, by groups of `rotation` columns, in 8 bits while it
        quantizes them; None if it has no such thing. It may leave fewer rows than `eight.least` to others."""
        return None


@dataclass(frozen=True)
class EightBit:
    """A product in 8 bits with a weight, from some number of rows of activations on.

    Attributes:
        least: that number. coding: which codes are multiplied; None if a reader cannot, and must leave it to others.
        sums: whether it depends on the sums of the activations' codes. run: of codes that are quantized again, the
            columns that share a scale; 0 for a row.
        floats: the product of e4m3 codes [m, k] with scales [m, 1] and those of a weight [n, k] with [n, 1], and a
            bias; None for integers.
        left: whether a product with so many rows of activations is left to others, which are faster; None for none.
        timed: whether a card that is slower with it than in floats, which is measured, is to compute in floats.
        at_once: whether a weight is quantized to e4m3 as it is decoded.
    """

    least: int
    coding: Coding | None
    sums: bool = False
    run: int = 0
    floats: Callable[..., Tensor] | None = None
    left: Callable[[int], bool] | None = None
    timed: bool = True
    at_once: bool = False


class Coding(IntFlag):
    """Flags for the integer codes of a weight that are multiplied. The numbers are those of cpu/int8.h."""

    BY_ROW = 0  # bytes as they are, with one scale for a row
    AGAIN = 1  # those of the decoded weight, quantized again
    BY_RUN = 2  # with several scales for a row, each for a run of columns
    UNPACKED = 4  # integers of fewer bits; for weights by rules alone, whose activations are no better
    BOTH = 8  # with BY_RUN: activations have a scale for each run, too

"""What a kernel library is: something that reads packed weights of some forms, faster than plain torch does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import IntFlag
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..core.packed_layout import Form


Parts = Mapping[str, "Tensor"]
# Of activations [..., columns] and a layer's parameters: the product [..., rows], or None where it cannot.
Prepared = Callable[["Tensor", "Mapping[str, Tensor | None]"], "Tensor | None"]


class Reader(ABC):
    """Kernels of one kind (C for the CPU, Triton for GPUs). Its methods get contiguous tensors of one device.

    Everything that a reader does is held against the backend's own decoding at first use (`choice`), so it need not
    look for a machine that computes wrongly; but what it cannot do it must say.
    """

    name: ClassVar[str]

    @abstractmethod
    def reads(self, form: Form, parts: Parts, dtype: torch.dtype) -> bool:
        """Whether it can decode such a weight to `dtype` (float32, bfloat16 or float16) on the device of the parts."""

    def wants_apart(self, form: Form) -> bool:
        """Whether it reads such GGUF blocks faster with their fields apart."""
        return False

    @abstractmethod
    def decode_into(self, form: Form, parts: Parts, out: Tensor) -> None:
        """The weight into `out`, contiguous [rows, columns]: the bits of the backend's own decoding."""

    def rows_into(self, form: Form, parts: Parts, start: int, stop: int, out: Tensor) -> bool:
        """Rows start to stop of what `decode_into` gives into `out`, contiguous [stop - start, columns]. False, and
        nothing is done, where it cannot."""
        return False

    def rounded(self, form: Form, parts: Parts, dtype: torch.dtype, start: int, stop: int, out: Tensor) -> bool:
        """As `rows_into`, of what `decode_into` gives for `dtype`, as float32."""
        return False

    def few(self, form: Form, parts: Parts, dtype: torch.dtype) -> int:
        """Up to how many rows of activations of `dtype` `product` is the faster way; 0 where it never is."""
        return 0

    def few_patches(self, form: Form, parts: Parts, dtype: torch.dtype) -> int:
        """The same of patches of images, for which torch's convolution is the other way."""
        return self.few(form, parts, dtype)

    def product(self, form: Form, parts: Parts, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """x [m, columns] times the transposed weight, and the bias [rows], into `out` [m, rows]; all of one dtype. Sums
        in float32, then rounded once.

        The weight is what `decode_into` gives for the dtype of x: both are the same numbers, but where `unrounded`.
        """
        raise NotImplementedError(self.name)

    def unrounded(self, form: Form, parts: Parts, dtype: torch.dtype) -> bool:
        """Whether the weight of `product` is rounded neither to the dtype of x nor anywhere before."""
        return False

    def prepared(
        self, form: Form, parts: Parts, dtype: torch.dtype, few: int, prefix: str, integers: tuple[Coding, int] | None
    ) -> Prepared | None:
        """`product` for the layers that hold such a weight, with all that can be looked up before: of up to `few` rows.
        None where there is no such thing.

        Args:
            prefix: what stands before the names of the parts among a layer's parameters.
            integers: for products in integers with more rows, which codes are multiplied, and from how many rows on.
        """
        return None


class Coding(IntFlag):
    """Which codes of a weight are multiplied. The numbers are those of native/int8.h."""

    BY_ROW = 0  # bytes as they are, with one scale for a row
    AGAIN = 1  # those of the decoded weight, quantized again
    BY_RUN = 2  # with several scales for a row, each for a run of columns
    UNPACKED = 4  # integers of fewer bits; for weights by rules alone, whose activations are no better

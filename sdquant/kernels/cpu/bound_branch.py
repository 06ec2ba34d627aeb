"""A product in 8-bit integers with a weight that has a low-rank branch, bound to a layer: one call for all of it.

Activations are divided or rotated a block of rows at a time, and the branch is added to the results of a block while
they are in the cache: with 4096 rows new memory for the divided activations took an eighth of the time of the product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import empty, float32, is_grad_enabled

from ..workspace import in_large_pages
from . import int8, narrow
from .bound_linear import Integers
from .int8_gemm import c_functions, packed_numbers
from .layout_descriptors import TYPES

if TYPE_CHECKING:
    from torch import Tensor

    from ...core import LowRank, PackedLayout
    from ..base import EightBit, Parts
    from .bound_linear import Own
    from .int8_gemm import Around, Rows


class IntegersWithBranch(Integers):
    """Of activations in float32: x [..., columns] times the transposed weight, plus the bias, from as many rows on as
    the integer product and the narrow ones have. What it leaves is done by parts, with the same numbers."""

    __slots__ = ("down", "smooth", "tall", "turned", "up")

    def __init__(
        self, form: PackedLayout, parts: Parts, branch: LowRank, eight: EightBit, prefix: str, rotation: int
    ) -> None:
        assert eight.coding is not None
        least, size = max(eight.least, narrow.LEAST), int8.sizes(form.columns)
        assert size is not None
        super().__init__(form, parts, float32, eight.coding, least, None, prefix, rotation, eight.left)
        own = branch.under(prefix)
        self.down, self.up, self.smooth, self.turned = own.down, own.up, own.smooth, branch.is_turned
        self.tall = size.most // 2  # rows whose codes stay in the second cache

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this kernel does not apply."""
        size, m = x.numel(), x.numel() // self.columns
        if size < self.least or (self.rotation and m <= 2 * self.tall) or (self.left is not None and self.left(m)):
            return None
        down, up = self._factor(own, self.down), self._factor(own, self.up)
        smooth = self._factor(own, self.smooth) if self.smooth else None
        at = self._addresses(x, own)
        if at is None or down is None or up is None or (smooth is None and self.smooth):
            return None
        out = in_large_pages(x.new_empty((*x.shape[:-1], self.rows)))
        narrow_of = narrow.Factors(self.columns, self.rows, up.shape[1], down.data_ptr(), up.data_ptr(), self.turned)
        around = self._around(x, narrow_of, out)
        weight, sizes_of = (*at, self.coding, 1), (self.rows, self.columns, self.each)
        divided_by = 0 if smooth is None else smooth.data_ptr()
        int8.rows_times(self.plan, weight, sizes_of, x, m, own.get("bias"), out, smooth=divided_by, around=around)
        if m <= 2 * self.tall:
            narrow.add_rows(narrow_of, x.data_ptr(), m, out.data_ptr())
        return out

    def _factor(self, own: Own, name: str) -> Tensor | None:
        """Return a part of the branch if this kernel can use it."""
        part = own[name]
        if part is None or part.dtype is not float32 or not part.is_cpu or not part.is_contiguous():
            return None
        return None if part.requires_grad and is_grad_enabled() else part

    def _around(self, x: Tensor, factors: narrow.Factors, out: Tensor) -> Around:
        """Return what rotates rows, multiplies them, and adds their branch, a block at a time."""
        of, to, wide, rotation = x.data_ptr(), out.data_ptr(), 4 * self.columns, self.rotation
        rotate: Any = c_functions().rotate

        def around(start: int, stop: int, rows: Rows) -> None:
            count = -(-(stop - start) // self.tall)
            step = -(-(stop - start) // (count * narrow.STEP)) * narrow.STEP
            floats = empty(step, self.columns, dtype=float32, device=x.device) if rotation else None
            between = narrow.empty_between(factors, step)
            for first in range(start, stop, step):
                last, at = min(first + step, stop), of
                if floats is not None:
                    here = floats.data_ptr()
                    numbers = of + first * wide, last - first, self.columns, rotation, 0, here
                    rotate(packed_numbers((TYPES[float32], *numbers)))
                    at = here - first * wide
                rows(first, last, at)
                narrow.add_some(factors, at + first * wide, last - first, between, to + first * self.rows * 4)

        return around

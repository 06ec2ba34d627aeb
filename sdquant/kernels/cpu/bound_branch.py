"""A product in 8-bit integers with a weight that has a low-rank branch, bound to a layer: one call for all of it.

Activations are divided, rotated and multiplied by the first factor a few rows at a time, while they are quantized, and
the second product is added to some columns of results at a time: passes over memory took longer than the products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import float32, is_grad_enabled

from ..workspace import in_large_pages
from . import int8, narrow
from .bound_linear import Integers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...core import LowRank, PackedLayout
    from ..base import EightBit, Parts
    from .bound_linear import Own


class IntegersWithBranch(Integers):
    """x [..., columns] times the transposed weight, plus the bias, from as many rows on as the integer product and the
    narrow ones have. What it leaves is done by parts, with the same numbers."""

    __slots__ = ("down", "smooth", "turned", "up")

    def __init__(
        self,
        form: PackedLayout,
        parts: Parts,
        branch: LowRank,
        dtype: torch.dtype,
        eight: EightBit,
        prefix: str,
        rotation: int,
    ) -> None:
        assert eight.coding is not None
        least = max(eight.least, narrow.LEAST[dtype])
        super().__init__(form, parts, dtype, eight.coding, least, None, prefix, rotation, eight.left)
        own = branch.under(prefix)
        self.down, self.up, self.smooth, self.turned = own.down, own.up, own.smooth, branch.is_turned

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this kernel does not apply."""
        size, m = x.numel(), x.numel() // self.columns
        if size < self.least or (self.left is not None and self.left(m)):
            return None
        down, up = self._factor(own, self.down, self.dtype), self._factor(own, self.up, self.dtype)
        smooth = self._factor(own, self.smooth, None) if self.smooth else None
        at = self._addresses(x, own)
        if at is None or down is None or up is None or (smooth is None and self.smooth):
            return None
        bias = own.get("bias")
        floats, factors = None if bias is None else bias.to(float32), None if smooth is None else smooth.to(float32)
        laid = narrow.lay(down, is_turned=self.turned)
        out = in_large_pages(x.new_empty((*x.shape[:-1], self.rows)))
        weight, sizes_of = (*at, self.coding, 1), (self.rows, self.columns, self.each)
        divided_by = 0 if factors is None else factors.data_ptr()
        branch = laid.data_ptr(), up.shape[1], up.data_ptr()
        int8.rows_times(self.plan, weight, sizes_of, x, m, floats, out, self.rotation, divided_by, branch)
        return out

    @staticmethod
    def _factor(own: Own, name: str, dtype: torch.dtype | None) -> Tensor | None:
        """Return a part of the branch if this kernel can use it."""
        part = own[name]
        if part is None or not part.is_cpu or not part.is_contiguous() or (part.requires_grad and is_grad_enabled()):
            return None
        return part if dtype is None or part.dtype is dtype else None

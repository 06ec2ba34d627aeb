"""A product in 8-bit integers with a weight that has a low-rank branch, bound to a layer: one call for all of it.

Activations are divided, rotated and multiplied by the first factor a few rows at a time, while they are quantized, and
the second product is added to some columns of results at a time: passes over memory took longer than the products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import float32, is_grad_enabled

from ..workspace import in_large_pages
from . import int8, narrow
from .bound_linear import Few, Integers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...core import LowRank, PackedLayout
    from ..base import EightBit, Parts
    from .bound_linear import Own


class IntegersWithBranch(Integers):
    """x [..., columns] times the transposed weight, plus the bias; a few rows by the exact product. What it leaves is
    done by parts, with the same numbers."""

    __slots__ = ("down", "smooth", "turned", "up")

    def __init__(
        self,
        form: PackedLayout,
        parts: Parts,
        branch: LowRank,
        dtype: torch.dtype,
        eight: EightBit,
        prefix: str,
        few: int,
        rotation: int,
    ) -> None:
        """Bind the kernels for up to `few` rows of x, unless they are rotated, and for more."""
        assert eight.coding is not None
        exact = Few(form, parts, dtype, few, prefix) if few and not rotation else None
        super().__init__(form, parts, dtype, eight.coding, eight.least, exact, prefix, rotation, eight.left)
        own = branch.under(prefix)
        self.down, self.up, self.smooth, self.turned = own.down, own.up, own.smooth, branch.is_turned

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this kernel does not apply."""
        size = x.numel()
        m = size // self.columns
        if not size or (size < self.least and self.few is None) or (self.left is not None and self.left(m)):
            return None
        down, up = self._factor(own, self.down, self.dtype), self._factor(own, self.up, self.dtype)
        smooth = self._factor(own, self.smooth, None) if self.smooth else None
        at = self._addresses(x, own)
        if at is None or down is None or up is None or (smooth is None and self.smooth):
            return None
        if size < self.least:
            return self._few(x, own, down, up, smooth)
        bias = own.get("bias")
        floats, divisors = None if bias is None else bias.to(float32), None if smooth is None else smooth.to(float32)
        branch, _kept = narrow.factors(down, up, m, self.turned)
        out = in_large_pages(x.new_empty((*x.shape[:-1], self.rows)))
        weight, sizes_of = (*at, self.coding, 1), (self.rows, self.columns, self.each)
        divided_by = 0 if divisors is None else divisors.data_ptr()
        int8.rows_times(self.plan, weight, sizes_of, x, m, floats, out, self.rotation, divided_by, branch)
        return out

    def _few(self, x: Tensor, own: Own, down: Tensor, up: Tensor, smooth: Tensor | None) -> Tensor | None:
        """Do so with the exact product of a few rows."""
        if self.few is None or (smooth is not None and smooth.dtype is not x.dtype):
            return None
        y = self.few(x if smooth is None else x / smooth, own)
        if y is not None:
            narrow.add(y, x, down, up, self.turned)
        return y

    @staticmethod
    def _factor(own: Own, name: str, dtype: torch.dtype | None) -> Tensor | None:
        """Return a part of the branch if this kernel can use it."""
        part = own[name]
        if part is None or not part.is_cpu or not part.is_contiguous() or (part.requires_grad and is_grad_enabled()):
            return None
        return part if dtype is None or part.dtype is dtype else None

"""Products with a weight that has a low-rank branch, bound to a layer: one call for all of it.

In 8-bit integers, activations are divided, rotated and multiplied by the first factor a few rows at a time, while they
are quantized, and the second product is added to some columns of results at a time: passes over memory took longer than
the products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import float32, is_grad_enabled

from ..large_pages import in_large_pages
from . import int8, narrow
from .bound_linear import Few, Integers
from .int8_gemm import packed_numbers
from .layout_descriptors import TYPES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...core import LowRank, PackedLayout
    from ..base import EightBit, Parts
    from .bound_linear import Own


class FewWithBranch:
    """`Few` with a branch: x [..., columns] of a few rows, divided by the factors for smoothing, and as they are."""

    __slots__ = ("factors", "few", "in_halves", "turned")

    def __init__(
        self,
        form: PackedLayout,
        parts: Parts,
        branch: LowRank,
        dtype: torch.dtype,
        few: int,
        prefix: str,
        *,
        in_halves: bool = False,
    ) -> None:
        """Bind the kernels for up to `few` rows of x.

        Args:
            in_halves: see `narrow.factors`; whether more rows are multiplied so, of which these do not differ.
        """
        self.in_halves = in_halves
        self.few, self.factors = Few(form, parts, dtype, few, prefix), _Factors(branch, dtype, prefix)
        self.turned = branch.is_turned

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this kernel does not apply."""
        factors = self.factors(own)
        if factors is None or not x.is_cpu or not x.is_contiguous():
            return None
        down, up, smooth = factors
        if smooth is not None:
            smooth = narrow.widened(smooth, x.dtype)
            if smooth.dtype is not x.dtype:
                return None
        if x.numel() > self.few.most:
            return self._in_turns(x, own, down, up, smooth)
        y = self._at_once(x, own, down, up, smooth)
        if y is None:
            y = self.few(x if smooth is None else x / smooth, own)
            if y is not None:
                narrow.add(y, x, down, up, self.turned, self.in_halves)
        return y

    def _in_turns(self, x: Tensor, own: Own, down: Tensor, up: Tensor, smooth: Tensor | None) -> Tensor | None:
        """Return the results of many rows, some at a time; None where a library is faster.

        Without factors for smoothing it is: with them it wants all quotients in memory.
        """
        if smooth is None or not self.few.most or not narrow.is_in_products(x.dtype):
            return None
        out = in_large_pages(x.new_empty((*x.shape[:-1], self.few.rows)))
        rows, results = x.view(-1, self.few.columns), out.view(-1, self.few.rows)
        step = -(-len(rows) // -(-x.numel() // self.few.most))
        for start in range(0, len(rows), step):
            some = slice(start, start + step)
            if self._at_once(rows[some], own, down, up, smooth, results[some]) is None:
                return None
        return out

    def _at_once(
        self, x: Tensor, own: Own, down: Tensor, up: Tensor, smooth: Tensor | None, out: Tensor | None = None
    ) -> Tensor | None:
        """Return the results of more than a few rows, in `out` if it is given; None where the kernels have no such
        product."""
        m = x.numel() // self.few.columns
        if m <= narrow.STEP or not narrow.is_in_products(x.dtype):
            return None
        numbers, by, _kept = narrow.factors(down, up, x.dtype, m, self.turned, smooth)
        between = narrow.between(x, numbers)
        pair = (by, by + 4 * self.few.columns) if by else (0, 0)
        return self.few(x, own, packed_numbers((*pair, *numbers, between.data_ptr())), out)


class IntegersWithBranch(Integers):
    """x [..., columns] times the transposed weight, plus the bias; a few rows by the exact product. What it leaves is
    done by parts, with the same numbers."""

    __slots__ = ("factors", "turned")

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
        exact = FewWithBranch(form, parts, branch, dtype, few, prefix, in_halves=True) if few and not rotation else None
        super().__init__(form, parts, dtype, eight.coding, eight.least, exact, prefix, rotation, eight.left)
        self.factors, self.turned = _Factors(branch, dtype, prefix), branch.is_turned

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this kernel does not apply."""
        size = x.numel()
        if size < self.least:
            return None if self.few is None else self.few(x, own)
        m = size // self.columns
        if not m or (self.left is not None and self.left(m)):
            return None
        at, factors = self._addresses(x, own), self.factors(own)
        if at is None or factors is None:
            return None
        down, up, smooth = factors
        bias = own.get("bias")
        floats = None if bias is None else bias.to(float32)
        branch, divided_by, _kept = narrow.factors(down, up, x.dtype, m, self.turned, smooth, in_halves=True)
        out = in_large_pages(x.new_empty((*x.shape[:-1], self.rows)))
        weight, sizes_of = (*at, self.coding, 1), (self.rows, self.columns, self.each)
        int8.rows_times(self.plan, weight, sizes_of, x, m, floats, out, self.rotation, divided_by, branch)
        return out


class _Factors:
    """Finds down, up and smooth among a layer's parameters; None if these kernels cannot use them."""

    __slots__ = ("down", "dtype", "smooth", "up")

    def __init__(self, branch: LowRank, dtype: torch.dtype, prefix: str) -> None:
        own = branch.under(prefix)
        self.down, self.up, self.smooth, self.dtype = own.down, own.up, own.smooth, dtype

    def __call__(self, own: Own) -> tuple[Tensor, Tensor, Tensor | None] | None:
        down, up, smooth = own[self.down], own[self.up], own[self.smooth] if self.smooth else None
        if not _is_usable(down) or not _is_usable(up) or (self.smooth and not _is_usable(smooth)):
            return None
        if smooth is not None and smooth.dtype not in TYPES:
            return None
        assert down is not None and up is not None
        are_exact = narrow.is_exact(down, self.dtype) and narrow.is_exact(up, self.dtype)
        return (down, up, smooth) if are_exact else None


def _is_usable(part: Tensor | None) -> bool:
    if part is None or not part.is_cpu or not part.is_contiguous():
        return False
    return not (part.requires_grad and is_grad_enabled())

"""Linear kernels bound to a layer's weight, with every lookup done in advance.

In a model the weights of the layers push Python's and torch's own code out of the caches, so that each step that a call
takes costs ten times what it does in a loop: 60 steps took a quarter of the time of a layer of 3072 x 3072 weights in
four bits with one row, a third of that of one in integers with 77.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import float32, get_num_threads, is_autocast_enabled, is_grad_enabled

from ..int8_reference import scales_in
from ..large_pages import in_large_pages
from . import extension, int8
from .layout_descriptors import TYPES, describe_layout, grid
from .threads import ALONE, over_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...core import Activations, PackedLayout
    from ..base import Coding, Parts, Prepared

Own = Mapping[str, "Tensor | None"]


class _Held:
    """Base of the bound kernels: the weight's layout; its parts are the layer's parameters named with `prefix`."""

    __slots__ = (
        "codes", "columns", "dtype", "grid", "kind", "nested", "plan", "rows", "scale", "scales", "shift", "shifts",
        "zero",
    )  # fmt: skip

    def __init__(self, form: PackedLayout, parts: Parts, dtype: torch.dtype, prefix: str) -> None:
        def named(part: int | str) -> str:
            return prefix + part if isinstance(part, str) and part else ""

        self.plan, self.kind, self.dtype = describe_layout(form, parts), TYPES[dtype], dtype
        self.rows, self.columns = form.rows, form.columns
        self.codes, self.scale, self.nested = named(form.codes), named(form.scale), named(form.nested)
        self.zero, self.shift = named(form.zero), named(form.shift)
        self.grid = 0 if self.zero else grid(form)
        self.scales = parts[form.scale].dtype if form.scale else None
        self.shifts = parts[form.shift].dtype if form.shift else None

    def _addresses(self, x: Tensor, own: Own) -> tuple[int, int, int, int, int] | None:
        """Return the parts' addresses as `layout_descriptors.addresses` does; None if this kernel does not apply."""
        if x.dtype is not self.dtype or not x.is_contiguous() or not x.is_cpu or not x.ndim:
            return None
        codes, bias = own[self.codes], own.get("bias")
        if codes is None or not codes.is_cpu or x.shape[-1] != self.columns or x.requires_grad or _autocast():
            return None
        if bias is not None:
            if bias.dtype is not self.dtype or not bias.is_contiguous():
                return None
            if bias.requires_grad and is_grad_enabled():
                return None
        scale, nested, zero, shift = 0, 0, self.grid, 0
        if self.scale:
            part: Any = own[self.scale]
            if part.dtype is not self.scales:
                return None
            scale = part.data_ptr()
        if self.nested:
            part = own[self.nested]
            nested = part.data_ptr()
        if self.zero:
            part = own[self.zero]
            zero = part.data_ptr()
        if self.shift:
            part = own[self.shift]
            if part.dtype is not self.shifts:
                return None
            shift = part.data_ptr()
        return codes.data_ptr(), scale, nested, zero, shift


def _autocast() -> bool:
    return is_autocast_enabled("cpu")


class Few(_Held):
    """`Native.product` bound to a layer: x [..., columns] of a few rows times the transposed weight, plus the bias."""

    __slots__ = ("alone", "most", "product")

    def __init__(self, form: PackedLayout, parts: Parts, dtype: torch.dtype, few: int, prefix: str) -> None:
        """Bind the kernel for up to `few` rows of x."""
        super().__init__(form, parts, dtype, prefix)
        self.product: Any = extension().product  # type: ignore[union-attr]
        self.most, self.alone = few * form.columns, ALONE // form.rows

    def __call__(self, x: Tensor, own: Own, beside: bytes = b"", out: Tensor | None = None) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this kernel does not apply.

        Args:
            beside: what `product_beside` of module.c takes; only where the kernels have it.
            out: contiguous memory for the results; None to allocate it.
        """
        size = x.numel()
        if not 0 < size <= self.most:
            return None
        at = self._addresses(x, own)
        if at is None:
            return None
        bias = own.get("bias")
        out = x.new_empty((*x.shape[:-1], self.rows)) if out is None else out
        to, of, m, added = out.data_ptr(), x.data_ptr(), size // self.columns, 0 if bias is None else bias.data_ptr()
        if beside:
            self._with(beside, size, (self.plan, self.kind, *at), (to, of, m, added))
        elif size < self.alone or get_num_threads() < 2:
            self.product(self.plan, self.kind, *at, 0, self.rows, to, of, m, added)
        else:
            common = (self.plan, self.kind, *at)
            over_rows(self.rows, size, lambda start, stop: self.product(*common, start, stop, to, of, m, added))
        return out

    def _with(self, beside: bytes, size: int, common: tuple[Any, ...], last: tuple[int, ...]) -> None:
        product = extension().product_beside  # type: ignore[union-attr]

        def some(start: int, stop: int) -> None:
            is_computed = product(*common, start, stop, *last, beside)
            assert is_computed

        over_rows(self.rows, size, some)


class Integers(_Held):
    """`cpu.int8.linear` bound to a layer: 8-bit integers, from `least` rows on; fewer rows are left to `few`, and some
    numbers of rows to others, as `left` says."""

    __slots__ = ("coding", "each", "few", "least", "left", "rotation")

    def __init__(
        self,
        form: PackedLayout,
        parts: Parts,
        dtype: torch.dtype,
        coding: Coding,
        least: int,
        few: Prepared | None,
        prefix: str,
        rotation: int = 0,
        left: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__(form, parts, dtype, prefix)
        self.coding, self.each, self.rotation, self.left = int(coding), scales_in(form, coding), rotation, left
        self.few, self.least = few, least * form.columns

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this kernel does not apply."""
        size = x.numel()
        if size < self.least:
            return None if self.few is None else self.few(x, own)
        if self.left is not None and size and self.left(size // self.columns):
            return None
        at = self._addresses(x, own)
        if at is None or not size:
            return None
        bias = own.get("bias")
        floats = bias if bias is None or bias.dtype is float32 else bias.to(float32)
        out = in_large_pages(x.new_empty((*x.shape[:-1], self.rows)))
        weight, sizes_of = (*at, self.coding, 1), (self.rows, self.columns, self.each)
        int8.rows_times(self.plan, weight, sizes_of, x, size // self.columns, floats, out, self.rotation)
        return out


class Codes(_Held):
    """An integer product bound to a layer, with activations quantized as in `packed_layout.Activations`."""

    __slots__ = ("coding", "each", "how", "static")

    def __init__(
        self, form: PackedLayout, parts: Parts, dtype: torch.dtype, coding: Coding, how: Activations, prefix: str
    ) -> None:
        super().__init__(form, parts, dtype, prefix)
        self.coding, self.how = int(coding), how
        self.each = form.columns // how.tile if how.tile else 1  # scales of a row
        self.static = prefix + how.scale if how.scale else ""

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this kernel does not apply."""
        at, size = self._addresses(x, own), x.numel()
        if at is None or not size:
            return None
        known = own[self.static] if self.static else None
        if known is not None:
            known = known.to(int8.scale_dtype(self.dtype)).to(float32)
        bias, m = own.get("bias"), size // self.columns
        floats = bias if bias is None or bias.dtype is float32 else bias.to(float32)
        codes, scale = int8.codes_of(x, m * self.each, self.how, known)
        out = in_large_pages(x.new_empty((*x.shape[:-1], self.rows)))
        sizes_of = (self.rows, self.columns, self.each)
        each = 1 if known is None else m
        int8.codes_times(self.plan, (*at, self.coding, 1), sizes_of, codes, (scale, each), m, floats, out)
        return out

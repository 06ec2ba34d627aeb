"""Products of few rows with a layer's weight, with nothing left to look up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import get_num_threads, is_autocast_enabled

from . import extension
from .blocks import grid
from .plans import TYPES, plan
from .threads import ALONE, over_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..forms import Form
    from ..reader import Parts


class Prepared:
    """x [..., columns] times the transposed weight, and the bias, by the C kernels: `Native.product` after all that can
    be asked once. A layer keeps it.

    In a model the weights of the layers push Python's and torch's own code out of the caches, so that each step that a
    call takes costs ten times what it does in a loop: 60 steps took a quarter of the time of a layer of 3072 x 3072
    weights in four bits with one row.
    """

    __slots__ = (
        "alone", "codes", "columns", "dtype", "grid", "kind", "most", "nested", "plan", "product", "rows", "scale",
        "scales", "shift", "shifts", "zero",
    )  # fmt: skip

    def __init__(self, form: Form, parts: Parts, dtype: torch.dtype, few: int, prefix: str) -> None:
        """`few`: up to how many rows of x. `prefix`: before the parts' names among the layer's parameters."""

        def named(part: int | str) -> str:
            return prefix + part if isinstance(part, str) and part else ""

        self.product: Any = extension().product  # type: ignore[union-attr]
        self.plan, self.kind, self.dtype = plan(form, parts), TYPES[dtype], dtype
        self.rows, self.columns = form.rows, form.columns
        self.most, self.alone = few * form.columns, ALONE // form.rows
        self.codes, self.scale, self.nested = named(form.codes), named(form.scale), named(form.nested)
        self.zero, self.shift = named(form.zero), named(form.shift)
        self.grid = 0 if self.zero else grid(form)
        self.scales = parts[form.scale].dtype if form.scale else None
        self.shifts = parts[form.shift].dtype if form.shift else None

    def __call__(self, x: Tensor, own: Mapping[str, Tensor | None]) -> Tensor | None:
        """[..., rows], from the parameters of the layer; None where it is not this case."""
        size, shape = x.numel(), x.shape
        if x.dtype is not self.dtype or not 0 < size <= self.most or not x.is_contiguous():
            return None
        if not shape or shape[-1] != self.columns:
            return None
        codes, bias = own[self.codes], own.get("bias")
        if codes is None or not codes.is_cpu or not x.is_cpu or x.requires_grad or is_autocast_enabled("cpu"):
            return None
        if bias is not None and (bias.dtype is not self.dtype or not bias.is_contiguous()):
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
        out = x.new_empty((*shape[:-1], self.rows))
        to, of, m, added = out.data_ptr(), x.data_ptr(), size // self.columns, 0 if bias is None else bias.data_ptr()
        common = (self.plan, self.kind, codes.data_ptr(), scale, nested, zero, shift)
        if size < self.alone or get_num_threads() < 2:
            self.product(*common, 0, self.rows, to, of, m, added)
        else:
            over_rows(self.rows, size, lambda start, stop: self.product(*common, start, stop, to, of, m, added))
        return out

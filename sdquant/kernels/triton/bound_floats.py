"""The product of `Backend.as_floats` bound to a layer on a GPU: activations are rounded to codes in one launch, these
are multiplied as floats, and the results scaled in a last one.

Without it a rule is read, and all launches are prepared, at each call.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, empty, float16, float32

from . import scheme_gemm, scheme_scaling
from .bound_linear import BIAS, BoundLinear, BoundParts, X

if TYPE_CHECKING:
    import torch

    from ...core import FloatRounding, PackedLayout
    from ..base import Parts
    from .bound_linear import Own
    from .launch_config import Launch


_PARTS = BIAS + 1  # where the addresses of a weight's parts begin


class BoundFloats(BoundParts):
    """`scheme_activations.as_floats` plus the bias, for layers that hold a weight."""

    __slots__ = ("how", "inner", "of", "rows")

    def __init__(
        self, form: PackedLayout, parts: Parts, dtype: torch.dtype, how: FloatRounding, prefix: str, few: int, most: int
    ) -> None:  # fmt: skip
        """Bind a weight for activations of `dtype`.

        Args:
            few, most: up to how many rows of activations the packed weight is multiplied, or may be.
        """
        self.how, self.rows = how, form.rows
        self.of = float32 if dtype == float16 else dtype  # of scales, and of codes as numbers
        weight, operand = (form, dtype) if how.decoded else (replace(form, scale=""), self.of)
        self.inner = BoundLinear(weight, parts, operand, few, prefix, None, most=most)
        names = (*self.inner.names, *(() if how.decoded else (prefix + form.scale,)))
        super().__init__(parts[form.codes], names, form.columns, dtype, 0)

    def __call__(self, x: Tensor, own: Own) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        addresses = self.addresses(x, own) if x.numel() else None
        if addresses is None:
            return None
        inner, where, size = self.inner, self.where, x.numel()
        numbers = empty(x.shape, dtype=inner.dtype, device=where)
        scale = empty(size // self.how.tile, dtype=self.of, device=where)
        addresses += (numbers.data_ptr(), scale.data_ptr())
        key: tuple[object, ...] = ("numbers", size)
        if not self.again(key, addresses) and not self._round(key, x, numbers, scale):
            return None
        # What the parts' addresses are checked for is the same there.
        begin, bias = numbers.data_ptr(), own.get("bias")
        y = inner.of_addresses(numbers, own, [begin, begin, *addresses[_PARTS : inner.more]], None)
        if y is None or self.how.decoded:
            return y if y is None or bias is None else y + bias
        out = y if y.dtype is self.dtype else empty(y.shape, dtype=self.dtype, device=where)  # each number by itself
        addresses += (y.data_ptr(), out.data_ptr())
        key = ("scaling", size, bias is None)
        return out if self.again(key, addresses) or self._scale(key, y, scale, own, bias, out) else None

    def _round(self, key: object, x: Tensor, numbers: Tensor, scale: Tensor) -> bool:
        def make() -> Launch:
            how = self.how
            return scheme_gemm.rounding(x, how.tile, how.limits, how.kind != "int", how.decoded, numbers, scale)

        first = _PARTS + len(self.names)
        return self.first(key, make, {"x": X, "out": first, "scale": first + 1})

    def _scale(
        self, key: object, y: Tensor, row_scale: Tensor, own: Own, bias: Tensor | None, out: Tensor
    ) -> bool:  # fmt: skip
        scale = own[self.names[-1]]
        assert scale is not None  # or there would be no addresses

        def make() -> Launch:
            flat = y.view(-1, self.rows), row_scale, scale.data.view(-1), bias, out.view(-1, self.rows)
            return scheme_scaling.scaling(*flat)

        of_weight, _, of_rows, results, to = range(self.inner.more, self.inner.more + 5)
        at = {"y": results, "out": to, "row_scale": of_rows, "scale": of_weight, "bias": to if bias is None else BIAS}
        return self.first(key, make, at)

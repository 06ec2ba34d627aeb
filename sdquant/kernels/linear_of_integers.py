"""A linear product with a weight whose codes stand for 8-bit integers (`Backend.integers`), prepared for a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..core import Packed
from .layer_parts import usable_parts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..core import PackedSpec
    from .base import Prepared


class LinearOfIntegers:
    """See the module."""

    __slots__ = ("dtype", "expand", "inner", "multiply", "names", "prefix", "spec")

    def __init__(
        self,
        spec: PackedSpec,
        names: Mapping[str, str],
        prefix: str,
        dtype: torch.dtype,
        expand: Callable[[Packed], Packed],
        inner: Prepared | None,
        multiply: Callable[[Packed, Tensor, Tensor | None], Tensor],
    ) -> None:
        """Prepare a product for activations of `dtype`.

        Args:
            spec: of the weight. names: of its parts among the layer's parameters, which begin with `prefix`.
            expand: what returns the weight of integers.
            inner: the prepared product with that weight, as a layer's of the same prefix, if there is one.
            multiply: that product for what `inner` leaves to others.
        """
        self.spec, self.names, self.prefix, self.dtype = spec, dict(names), prefix, dtype
        self.expand, self.inner, self.multiply = expand, inner, multiply

    def __call__(self, x: Tensor, own: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        if x.dtype is not self.dtype or x.requires_grad or not x.ndim or x.shape[-1] != self.spec.shape[1]:
            return None
        parts, bias = usable_parts(x, own, self.names), own.get("bias")
        if parts is None:
            return None
        weight = self.expand(Packed(spec=self.spec, parts=parts))
        y = None
        if self.inner is not None:
            y = self.inner(x, {**{self.prefix + name: part for name, part in weight.parts.items()}, "bias": bias})
        return self.multiply(weight, x, None if bias is None else bias.to(x.dtype)) if y is None else y

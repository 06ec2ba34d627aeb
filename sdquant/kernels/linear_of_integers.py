"""A linear product with a weight whose codes stand for 8-bit integers (`Backend.integers`), prepared for a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch.nn import functional as F

from ..core import Packed, torch_dtypes
from .hadamard import rotate
from .layer_parts import usable_parts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..core import Expansion, PackedSpec
    from .base import Prepared


_FEW = 64  # rows, up to which a card may have kernels for products of a few


def multiply_decoded(expand: Expansion[Packed], rotation: int, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Multiply x [..., in], rotated as the weight is, by a weight that a card decodes in one pass, and add the bias;
    None where it cannot, and for few rows."""
    if x.is_cpu or x.dtype not in torch_dtypes.COMPUTE_DTYPES or x.numel() <= _FEW * x.shape[-1]:
        return None
    weight = expand.decoded(x.dtype)
    if weight is None:
        return None
    return F.linear(rotate(x, rotation) if rotation else x, weight, None if bias is None else bias.to(x.dtype))


class LinearOfIntegers:
    """See the module."""

    __slots__ = ("decodes", "dtype", "expand", "inner", "multiply", "names", "prefix", "spec")

    def __init__(
        self,
        spec: PackedSpec,
        names: Mapping[str, str],
        prefix: str,
        dtype: torch.dtype,
        expand: Callable[[Packed], Expansion[Packed]],
        decodes: bool,
        inner: Prepared | None,
        multiply: Callable[[Packed, Tensor, Tensor | None], Tensor],
    ) -> None:
        """Prepare a product for activations of `dtype`.

        Args:
            spec: of the weight. names: of its parts among the layer's parameters, which begin with `prefix`.
            expand: what returns the expansion of a weight. decodes: whether `multiply_decoded` may be used.
            inner: the prepared product with that weight, as a layer's of the same prefix, if there is one.
            multiply: that product for what `inner` leaves to others.
        """
        self.spec, self.names, self.prefix, self.dtype = spec, dict(names), prefix, dtype
        self.expand, self.decodes, self.inner, self.multiply = expand, decodes, inner, multiply

    def __call__(self, x: Tensor, own: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        if x.dtype is not self.dtype or x.requires_grad or not x.ndim or x.shape[-1] != self.spec.shape[1]:
            return None
        parts, bias = usable_parts(x, own, self.names), own.get("bias")
        if parts is None:
            return None
        expand = self.expand(Packed(spec=self.spec, parts=parts))
        y = multiply_decoded(expand, self.spec.rotation, x, bias) if self.decodes else None
        if y is not None:
            return y
        weight = expand()
        if self.inner is not None:
            y = self.inner(x, {**{self.prefix + name: part for name, part in weight.parts.items()}, "bias": bias})
        return self.multiply(weight, x, None if bias is None else bias.to(x.dtype)) if y is None else y

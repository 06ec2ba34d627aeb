"""A linear product with a weight whose codes stand for 8-bit integers (`Backend.integers`), prepared for a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch.nn import functional as F

from ..core import Packed, torch_dtypes
from . import fp8_linear, int8_linear
from .hadamard import rotate
from .layer_parts import usable_parts
from .triton import imports
from .triton.triton_kernels import few_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..core import Expansion, PackedSpec
    from .base import Prepared


def multiply_decoded(
    expand: Expansion[Packed], packed: Packed, x: Tensor, bias: Tensor | None, compute: str | None
) -> Tensor | None:
    """Multiply x [..., in], rotated as the weight is, by a weight that a card decodes in one pass, and add the bias;
    None where it cannot, for few rows, and where products are of integers.

    Args:
        compute: see `dispatch.linear`; "fp8" quantizes the decoded weight again.
    """
    if x.is_cpu or x.dtype not in torch_dtypes.COMPUTE_DTYPES:
        return None
    if x.numel() <= few_rows(x.dtype, x.device) * x.shape[-1]:
        return None
    rotation, in_floats = packed.spec.rotation, compute == fp8_linear.NAME and _pays(packed, x)
    if compute is not None and not in_floats:
        return None
    weight = expand.decoded(x.dtype)
    if weight is None:
        return None
    if in_floats:
        return fp8_linear.linear(packed, None, weight, x, bias, rotation)
    return F.linear(rotate(x, rotation) if rotation else x, weight, None if bias is None else bias.to(x.dtype))


def _pays(packed: Packed, x: Tensor) -> bool:
    """Return whether the product in 8-bit floats is faster, and rotates x itself where the weight is rotated."""
    rotation = packed.spec.rotation
    return fp8_linear.rotates(packed, None, x, rotation) if rotation else fp8_linear.pays(packed, None, x)


def bound_to_layer(
    expand: Expansion[Packed], packed: Packed, weight: Packed, dtype: torch.dtype, compute: str | None, prefix: str,
    inner: Prepared | None,
) -> Prepared | None:  # fmt: skip
    """Return the product with launches that are bound to a layer on a card; None where there are none.

    Args:
        weight: the integers that `expand` makes. compute, prefix, inner: see `LinearOfIntegers`.
    """
    form = weight.spec.scheme.codec.form(weight.without_rotation)
    if packed.device.type != "cuda" or inner is None or form is None or compute not in (None, "", int8_linear.NAME):
        return None
    binder, of = imports.expansion_binder(), expand.sources()
    inner_product = getattr(inner, "at_once", inner)  # where the weight is rotated
    if binder is None or imports.expansion(packed.device) is None:
        return None
    if not binder.can_bind(of, packed.parts, inner_product, (form.codes, form.scale)):
        return None
    rotation, few = packed.spec.rotation, None if compute == int8_linear.NAME else few_rows(dtype, packed.device)
    if rotation and imports.rotation(packed.device, rotation) is None:
        return None
    product: Prepared = binder.BoundExpansion(
        of, packed.parts, packed.spec.shape, dtype, prefix, rotation, few, inner_product
    )
    return product


class LinearOfIntegers:
    """See the module."""

    __slots__ = ("at_once", "compute", "dtype", "expand", "inner", "multiply", "names", "prefix", "spec")

    def __init__(
        self,
        spec: PackedSpec,
        names: Mapping[str, str],
        prefix: str,
        dtype: torch.dtype,
        expand: Callable[[Packed], Expansion[Packed]],
        compute: str | None,
        inner: Prepared | None,
        multiply: Callable[[Packed, Tensor, Tensor | None], Tensor],
        at_once: Prepared | None = None,
    ) -> None:
        """Prepare a product for activations of `dtype`.

        Args:
            spec: of the weight. names: of its parts among the layer's parameters, which begin with `prefix`.
            expand: what returns the expansion of a weight. compute: see `dispatch.linear`.
            inner: the prepared product with that weight, as a layer's of the same prefix, if there is one.
            multiply: that product for what `inner` leaves to others.
            at_once: all of it with launches that are bound to the layer, if there are such.
        """
        self.spec, self.names, self.prefix, self.dtype = spec, dict(names), prefix, dtype
        self.expand, self.compute, self.inner, self.multiply = expand, compute, inner, multiply
        self.at_once = at_once

    def __call__(self, x: Tensor, own: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        if self.at_once is not None:
            y = self.at_once(x, own)
            if y is not None:
                return y
        if x.dtype is not self.dtype or x.requires_grad or not x.ndim or x.shape[-1] != self.spec.shape[1]:
            return None
        parts, bias = usable_parts(x, own, self.names), own.get("bias")
        if parts is None:
            return None
        packed = Packed(spec=self.spec, parts=parts)
        expand = self.expand(packed)
        y = multiply_decoded(expand, packed, x, bias, self.compute)
        if y is not None:
            return y
        weight = expand()
        if self.inner is not None:
            y = self.inner(x, {**{self.prefix + name: part for name, part in weight.parts.items()}, "bias": bias})
        return self.multiply(weight, x, None if bias is None else bias.to(x.dtype)) if y is None else y

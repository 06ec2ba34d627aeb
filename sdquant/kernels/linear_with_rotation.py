"""A linear product with a rotated weight, prepared for a layer: rotate the activations, then multiply the stored codes.

Kernels that rotate activations while they quantize them do both at once: `Reader.prepared_with_rotation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..core import Packed
from .hadamard import rotate
from .layer_parts import usable_parts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..core import PackedSpec
    from .base import Prepared


class LinearWithRotation:
    """See the module."""

    __slots__ = ("at_once", "columns", "dtype", "group", "inner", "least", "multiply", "parts", "spec")

    def __init__(
        self,
        spec: PackedSpec,
        parts: Mapping[str, str],
        dtype: torch.dtype,
        at_once: Prepared | None,
        least: int,
        inner: Prepared | None,
        multiply: Callable[[Packed, Tensor, Tensor | None], Tensor],
    ) -> None:
        """Prepare a product for activations of `dtype`.

        Args:
            spec: of the weight. parts: the name of each part among the layer's parameters.
            at_once: the prepared product that rotates x itself, if there is one. What it cannot do of `least` rows and
                more is left to `dispatch.linear`, whose numbers are the same.
            inner: the prepared product of rotated activations, if there is one.
            multiply: the product with the rotated weight for what `inner` leaves to others.
        """
        self.spec, self.group, self.columns = spec.without_rotation, spec.rotation, spec.shape[1]
        self.parts, self.dtype, self.multiply = dict(parts), dtype, multiply
        self.at_once, self.least, self.inner = at_once, least * spec.shape[1], inner

    def __call__(self, x: Tensor, own: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        if x.dtype is not self.dtype or x.requires_grad or not x.ndim or x.shape[-1] != self.columns:
            return None
        if self.at_once is not None:
            y = self.at_once(x, own)
            if y is not None or x.numel() >= self.least:
                return y
        parts = usable_parts(x, own, self.parts)
        if parts is None:
            return None
        rotated_x = rotate(x, self.group)
        y = None if self.inner is None else self.inner(rotated_x, own)
        if y is None:
            bias = own.get("bias")
            y = self.multiply(
                Packed(spec=self.spec, parts=parts), rotated_x, None if bias is None else bias.to(x.dtype)
            )
        return y

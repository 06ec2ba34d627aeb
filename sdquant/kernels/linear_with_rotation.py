"""A linear product with a rotated weight, prepared for a layer: rotate the activations, then multiply the stored codes.

The rotation is a step of its own here. A kernel that does it while it quantizes the activations takes this place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from ..core import Packed
from .hadamard import rotate

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import PackedSpec
    from .base import Prepared


class LinearWithRotation:
    """See the module."""

    __slots__ = ("columns", "dtype", "group", "inner", "multiply", "parts", "spec")

    def __init__(
        self,
        spec: PackedSpec,
        parts: Mapping[str, str],
        dtype: torch.dtype,
        inner: Prepared | None,
        multiply: Callable[[Packed, Tensor, Tensor | None], Tensor],
    ) -> None:
        """Prepare a product for activations of `dtype`.

        Args:
            spec: of the weight. parts: the name of each part among the layer's parameters.
            inner: the prepared product with the rotated weight, if there is one.
            multiply: the product with the rotated weight for what `inner` leaves to others.
        """
        self.spec, self.group, self.columns = spec.without_rotation, spec.rotation, spec.shape[1]
        self.parts, self.dtype, self.inner, self.multiply = dict(parts), dtype, inner, multiply

    def __call__(self, x: Tensor, own: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        if x.dtype is not self.dtype or x.requires_grad or not x.ndim or x.shape[-1] != self.columns:
            return None
        bias = own.get("bias")
        if bias is not None and bias.requires_grad and torch.is_grad_enabled():
            return None
        parts: dict[str, Tensor] = {}
        for part, name in self.parts.items():
            tensor = own[name]
            if tensor is None or tensor.device != x.device:
                return None
            parts[part] = tensor.detach()
        if torch.is_autocast_enabled(x.device.type):
            return None
        rotated_x = rotate(x, self.group)
        y = None if self.inner is None else self.inner(rotated_x, own)
        if y is None:
            y = self.multiply(
                Packed(spec=self.spec, parts=parts), rotated_x, None if bias is None else bias.to(x.dtype)
            )
        return y

"""A convolution in 8-bit integers, prepared for a layer on a card: its patches are copied out, and multiplied by bound
launches; or the exact one, where that is measured to be faster.

Unbound, an H200's processor took 400 to 600 us for such a call, where the card was done with the product in a tenth of
that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from ..core import Geometry, Packed
from . import exact_or_eight, int8_linear
from .fastest import prefers_other, verdict_of
from .im2col import patches

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import PackedLayout
    from .base import Prepared

Exact = Callable[["Tensor", Any], "Tensor | None"]
_MOST_KEPT = 64  # shapes of images


class Int8Convolution:
    """See the module."""

    __slots__ = ("columns", "dtype", "exact", "form", "packed", "product", "shape", "steps")

    def __init__(
        self, packed: Packed, form: PackedLayout, dtype: torch.dtype, exact: Exact | None, product: Prepared | None
    ) -> None:
        """Prepare a convolution of activations of `dtype`.

        Args:
            exact: the prepared convolution with the float weight, of x and a layer, if there is one.
            product: the prepared product in integers of patches, of any number, if there is one.
        """
        # Its parts are the layer's, which may be moved, and would be kept in memory here.
        parts = {name: part.to("meta") for name, part in packed.parts.items()}
        self.packed, self.form, self.dtype = Packed(spec=packed.spec, parts=parts), form, dtype
        self.shape = packed.spec.shape
        self.columns = math.prod(self.shape[1:])
        self.exact, self.product = exact, product
        # By the shape of x and the layer's numbers: how it lies, the patches, and what the choice depends on; None if
        # products in integers cannot pay.
        self.steps: dict[tuple[object, ...], tuple[Geometry, int, Hashable] | None] = {}

    def __call__(self, x: Tensor, layer: Any) -> Tensor | None:
        """Convolve x [b, in, ...] as `layer` says; None if this does not apply."""
        if x.ndim != len(self.shape) or x.dtype is not self.dtype or layer.padding_mode != "zeros" or not x.numel():
            return None
        if layer.weight_function or layer.bias_function or x.shape[1] != self.shape[1] * layer.groups:
            return None
        key = (x.shape, layer.stride, layer.padding, layer.dilation, layer.groups)
        if key not in self.steps:
            if len(self.steps) >= _MOST_KEPT:
                self.steps = {}  # another thread may be about to read the one before
            self.steps[key] = self._steps_of(x, layer)
        steps = self.steps.get(key)
        if steps is None:
            return None if self.exact is None else self.exact(x, layer)
        how, rows, kind = steps
        is_exact = verdict_of(kind, rows, x.device)
        if is_exact is None and self.exact is not None and self.product is not None:
            exact, y = self.exact, self._in_eight(x, layer, how)
            if y is None or exact(x, layer) is None:
                return y
            if not prefers_other(kind, rows, x.device, lambda: self._in_eight(x, layer, how), lambda: exact(x, layer)):
                return y
            is_exact = True
        if is_exact:
            return None if self.exact is None else self.exact(x, layer)
        return self._in_eight(x, layer, how)

    def _steps_of(self, x: Tensor, layer: Any) -> tuple[Geometry, int, Hashable] | None:
        how = Geometry(stride=layer.stride, padding=layer.padding, dilation=layer.dilation, groups=layer.groups)
        if not int8_linear.pays_convolved(self.packed, self.form, x, how):
            return None
        rows = exact_or_eight.patches_of(x.shape, self.shape[2:], how)
        kind = exact_or_eight.kind_of_convolution(self.packed, self.form, self.dtype, how)
        return how, rows, kind if self.product is None else ("bound", kind)

    def _in_eight(self, x: Tensor, layer: Any, how: Geometry) -> Tensor | None:
        """Convolve in integers; None for what is left to others, such as patches that memory cannot hold at once."""
        product, kernel = self.product, self.shape[2:]
        windows = patches(x, kernel, how)
        if product is None or windows.numel() > int8_linear.most_patches(x.device):
            return None
        y = product(windows.reshape(-1, self.columns), layer._parameters)
        if y is None:
            return None
        y = y.view(*windows.shape[: 1 + len(kernel)], self.shape[0]).movedim(-1, 1)
        last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        return y if last else y.contiguous()

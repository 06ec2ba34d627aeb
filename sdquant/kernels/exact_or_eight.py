"""Whether a product in 8 bits is faster on this machine than the one with the float weight.

`compute` is for products that are faster in 8 bits. On a card that is measured for each form and size at its first use:
formats with several scales for a row, and convolutions whose patches have to be copied, may take longer than floats. On
a CPU products are in 8 bits from fixed sizes on (`int8_linear.Least`): the two differ in their results, and an image is
not to depend on what else the machine did. With SDQUANT_TUNE=0 nothing is measured on a card, either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from .fastest import prefers_other
from .im2col import outputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..core import Geometry, Packed, PackedLayout


def kind_of_linear(compute: str, packed: Packed, form: PackedLayout | None, dtype: torch.dtype) -> Hashable:
    """Return what the choice depends on for the linear layers of a weight."""
    spec = packed.spec
    stored = None if form is None else (form.packing, form.table, form.group, form.apart)
    return "exact", compute, spec.scheme.name, spec.shape, stored, str(dtype)


def kind_of_convolution(packed: Packed, form: PackedLayout | None, dtype: torch.dtype, how: Geometry) -> Hashable:
    """Return the same for a convolution."""
    return (*kind_of_linear("int8", packed, form, dtype), tuple(how.stride), tuple(how.dilation))  # type: ignore[misc]


def patches_of(shape: torch.Size, kernel: tuple[int, ...], how: Geometry) -> int:
    """Return the number of patches of images of a shape, which are rows of activations."""
    return shape[0] * math.prod(outputs(shape[2:], kernel, how))


def linear(kind: Hashable, x: Tensor, eight: Callable[[], Tensor], exact: Callable[[], Tensor]) -> Tensor:
    """Multiply x [..., in] by the faster one."""
    if not x.is_cuda:
        return eight()
    rows = x.numel() // x.shape[-1]
    return exact() if prefers_other(kind, rows, x.device, eight, exact) else eight()


def convolve(
    packed: Packed, form: PackedLayout | None, x: Tensor, how: Geometry, eight: Callable[[], Tensor],
    exact: Callable[[], Tensor],
) -> Tensor:  # fmt: skip
    """Convolve x by the faster one."""
    if not x.is_cuda:
        return eight()
    rows = patches_of(x.shape, packed.spec.shape[2:], how)
    kind = kind_of_convolution(packed, form, x.dtype, how)
    return exact() if prefers_other(kind, rows, x.device, eight, exact) else eight()

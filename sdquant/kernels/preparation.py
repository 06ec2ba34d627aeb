"""Prepared products: what `dispatch.linear` chooses for a layer's weight, chosen once for many calls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..core import input_scale_of
from . import dispatch, fp8_linear, int8_linear
from .branch_preparation import eight_of, with_branch
from .int8_convolution import Int8Convolution
from .linear_of_integers import LinearOfIntegers, bound_to_layer
from .linear_with_branch import LinearWithBranch
from .linear_with_rotation import LinearWithRotation

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from ..core import Backend, Expansion, Packed, PackedLayout
    from .base import Prepared

__all__ = ["prepared", "prepared_convolution"]

_NEVER = 1 << 31  # rows


def prepared(
    backend: Backend, packed: Packed, form: PackedLayout | None, dtype: torch.dtype, compute: str | None, prefix: str
) -> Prepared | None:
    """Return `dispatch.linear` for activations of `dtype` as far as it can be prepared; see `Reader.prepared`."""
    if compute == dispatch.LIBRARY:
        return None
    expand = backend.integers(packed)
    if expand is not None:
        weight = expand()
        codec = weight.spec.scheme.codec
        form = codec.form(weight)
        inner = prepared(codec, weight, form, dtype, compute, prefix)
        return LinearOfIntegers(
            packed.spec, {name: prefix + name for name in packed.parts}, prefix, dtype, partial(_expansion, backend),
            compute, inner, partial(dispatch.multiply, codec, form, compute),
            bound_to_layer(expand, packed, weight, dtype, compute, prefix, inner),
        )  # fmt: skip
    if packed.spec.rotation:
        return _prepared_with_rotation(backend, packed, dtype, compute, prefix)
    branch = backend.low_rank(packed)
    if branch is not None:
        residual = replace(packed, parts=branch.residual_of(packed.parts))
        form = backend.form(residual)
        return LinearWithBranch(
            packed.spec, branch, prefix, dtype, prepared(backend, residual, form, dtype, compute, prefix),
            partial(dispatch.multiply, backend, form, compute), _with_branch(backend, packed, dtype, compute, prefix),
            compute == int8_linear.NAME,
        )  # fmt: skip
    kernels = dispatch.way(backend, packed, form, dtype)
    if form is None or kernels.reader is None:
        return None
    # It has no effect elsewhere, which `dispatch.linear` says; and kernels that quantize activations do so by rows.
    if compute == fp8_linear.NAME and (packed.device.type != "cuda" or input_scale_of(packed) is not None):
        return None
    eight = eight_of(backend, packed, form, dtype, compute)
    few = kernels.few if eight is None else min(kernels.few, eight.least - 1)
    return kernels.reader.prepared(form, packed.parts, dtype, few, prefix, eight)


def prepared_convolution(
    backend: Backend, packed: Packed, form: PackedLayout | None, dtype: torch.dtype, compute: str | None, prefix: str
) -> Callable[..., Tensor | None] | None:
    """Return `dispatch.convolve` for activations of `dtype`, of x and a layer, if a reader prepares it."""
    shape = packed.spec.shape
    in_eight = compute == int8_linear.NAME and packed.device.type == "cuda"
    if form is None or not (compute is None or in_eight):
        return None
    if backend.low_rank(packed) is not None or packed.spec.rotation or backend.integers(packed) is not None:
        return None
    reader, run = dispatch.way(backend, packed, form, dtype).reader, dispatch.CONVOLUTIONS[len(shape) - 3]
    exact = None if reader is None else reader.prepared_convolution(form, packed.parts, dtype, prefix, shape, run)
    if not in_eight:
        return exact
    eight, product = int8_linear.prepared(backend, packed, form, dtype), None
    if reader is not None and eight.coding is not None:
        by_rows = replace(eight, least=1, timed=False)  # the convolution is timed, which copies patches
        product = reader.prepared(form, packed.parts, dtype, 0, prefix, by_rows)
    return Int8Convolution(packed, form, dtype, exact, product)


def _expansion(backend: Backend, packed: Packed) -> Expansion[Packed]:
    expand = backend.integers(packed)
    assert expand is not None
    return expand


def _with_branch(
    backend: Backend, packed: Packed, dtype: torch.dtype, compute: str | None, prefix: str, rotation: int = 0
) -> Prepared | None:
    form, kernels = dispatch.of_residual(backend, packed, dtype)
    reader, few = kernels.reader, kernels.few
    return with_branch(backend, packed, form, reader, few, dtype, compute, prefix, rotation)


def _prepared_with_rotation(
    backend: Backend, packed: Packed, dtype: torch.dtype, compute: str | None, prefix: str
) -> Prepared:
    codes = packed.without_rotation
    form = backend.form(codes)

    at_once, least = _with_branch(backend, codes, dtype, compute, prefix, packed.spec.rotation), _NEVER
    kernels = dispatch.way(backend, codes, form, dtype)
    if at_once is None and form is not None and kernels.reader is not None:
        eight = eight_of(backend, codes, form, dtype, compute)
        few = kernels.few if eight is None else min(kernels.few, eight.least - 1)
        least = 0 if eight is None else eight.least
        at_once = kernels.reader.prepared_with_rotation(
            form, codes.parts, dtype, few, prefix, eight, packed.spec.rotation
        )
    inner = prepared(backend, codes, form, dtype, compute, prefix)
    names = {name: prefix + name for name in packed.parts}
    return LinearWithRotation(
        packed.spec, names, dtype, at_once, least, inner, partial(dispatch.multiply, backend, form, compute)
    )

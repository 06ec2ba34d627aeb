"""Products with a weight that has a low-rank branch, prepared at once where a reader has such; and those in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from . import block_scaled, fp8_linear, int8_linear
from .base import EightBit

if TYPE_CHECKING:
    import torch

    from ..core import Backend, Packed, PackedLayout
    from .base import Prepared, Reader


def eight_of(
    backend: Backend, packed: Packed, form: PackedLayout, dtype: torch.dtype, compute: str | None
) -> EightBit | None:
    """Return the product in 8 bits that a reader may prepare, or leave to others."""
    if block_scaled.block_of(packed, form, compute, dtype):
        return EightBit(block_scaled.ROWS, None)
    if compute == int8_linear.NAME:
        return int8_linear.prepared(backend, packed, form, dtype)
    if compute == fp8_linear.NAME and packed.device.type == "cuda":
        return fp8_linear.prepared(packed, form, dtype)
    return None


def with_branch(
    backend: Backend, packed: Packed, form: PackedLayout | None, reader: Reader | None, few: int, dtype: torch.dtype,
    compute: str | None, prefix: str, rotation: int = 0,
) -> Prepared | None:  # fmt: skip
    """Return the product that does all of a weight with a branch at once, if there is one; see `prepared`.

    Args:
        form, reader, few: of the residual. rotation: how many columns of activations it rotates together before; 0 for
            none.
    """
    branch = backend.low_rank(packed)
    if branch is None or form is None or reader is None:
        return None
    residual = replace(packed, parts=branch.residual_of(packed.parts))
    eight = eight_of(backend, residual, form, dtype, compute)
    if eight is None and compute is not None:
        return None
    most = few if eight is None else min(few, eight.least - 1)
    return reader.prepared_with_branch(form, residual.parts, branch, packed.parts, dtype, prefix, most, eight, rotation)

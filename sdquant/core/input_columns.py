"""Weights whose inputs are multiplied or gathered, column by column, before the product with what their codes are.

Parts of a packed weight W [out, in], which has no memory layout (`Backend.form`) because of them:

columns: float32 [in], multiplies the columns of the weight: of smoothing (AWQ, ModelOpt's pre_quant_scale).
order: int32 [in], the column of the weight that each column of the codes is: of groups that are not of neighbours
    (GPTQ's desc_act).

The other parts are those of a weight R like any other: x W^T = (x * columns)[..., order] R^T. Only `kernels.dispatch`
computes with R; `Backend.decode` returns W.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .backend import Packed

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS, ORDER = "columns", "order"
_PARTS = {COLUMNS, ORDER}


def has_any(packed: Packed) -> bool:
    """Return whether the inputs of a weight are multiplied or gathered."""
    return not _PARTS.isdisjoint(packed.parts)


def without(packed: Packed) -> Packed:
    """Return R of the module's docstring."""
    parts = {name: part for name, part in packed.parts.items() if name not in _PARTS}
    return Packed(spec=packed.spec, parts=parts)


def gather(packed: Packed, x: Tensor) -> Tensor:
    """Return (x * columns)[..., order] for x [..., in], in its dtype; multiplied in float32."""
    factors, order = packed.parts.get(COLUMNS), packed.parts.get(ORDER)
    if factors is not None:
        x = (x * factors).to(x.dtype)
    return x if order is None else x.index_select(-1, order)


def spread(packed: Packed, grad: Tensor) -> Tensor:
    """Return the gradient of x for that of `gather`'s result, [..., in]."""
    import torch

    factors, order = packed.parts.get(COLUMNS), packed.parts.get(ORDER)
    if order is not None:
        places = torch.empty_like(order, dtype=torch.int64)
        places[order.long()] = torch.arange(len(order), device=order.device)
        grad = grad.index_select(-1, places)
    return grad if factors is None else (grad * factors).to(grad.dtype)

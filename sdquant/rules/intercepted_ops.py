"""torch's functions that multiply two activations, and their quantized replacements in modules that a rule names.

A handler gets the call's arguments and returns the result, or None if the call is not a product of two activations; in
that case torch's own function runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import torch_dtypes
from ..utils.autocast import is_autocast_on
from .core import attention, einsum
from .providers.product import Site, product

Handler = Callable[..., Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation that rules name.

    Attributes:
        name: as in rules.
        counted: Qwix's name, from which the names of its operands are made.
        products: number of products in a call.
        handler: takes (site, number of the first product in its module, arguments).
    """

    name: str
    counted: str
    products: int
    handler: Handler


def _activations(*operands: Any) -> bool:
    """Return whether all are float tensors and none is a parameter or a view of one."""
    return all(
        isinstance(one, Tensor)
        and one.dtype in torch_dtypes.FLOATS
        and not isinstance(one, nn.Parameter)
        and not isinstance(one._base, nn.Parameter)
        for one in operands
    )


def _cast(*operands: Tensor) -> tuple[Tensor, ...]:
    """Cast the operands to autocast's dtype, where torch's own function would."""
    device = operands[0].device.type
    if not is_autocast_on(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(one if one.dtype == torch.float64 else one.to(dtype) for one in operands)


def _sdpa(site: Site, number: int, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Tensor | None:
    if not _activations(query, key, value):
        return None
    query, key, value = _cast(query, key, value)
    return attention.attention(query, key, value, *args, **more, rule=attention.sites(site, number))


def _matmul(site: Site, number: int, input: Tensor, other: Tensor, **more: Any) -> Tensor | None:
    """Multiply two tensors of one axis or more. Some of torch's functions call `other` `mat2` or `tensor2`."""
    if more or not _activations(input, other):
        return None
    a, b = _cast(input, other)
    done = product(a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b, _named(site, "dot_general", number))
    done = done.squeeze(-1) if b.ndim == 1 else done
    return done.squeeze(-1 if b.ndim == 1 else -2) if a.ndim == 1 else done


def _bmm(site: Site, number: int, input: Tensor, mat2: Tensor, **more: Any) -> Tensor | None:
    return _matmul(site, number, input, mat2, **more)


def _baddbmm(
    site: Site,
    number: int,
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    **more: Any,
) -> Tensor | None:
    """Return alpha times the product, plus beta times `input`, which is ignored if beta is 0."""
    done = _matmul(site, number, batch1, batch2, **more)
    if done is None:
        return None
    done = done * alpha if alpha != 1 else done
    return done if beta == 0 else (done + beta * input).to(done.dtype)


def _einsum(site: Site, number: int, equation: Any, *operands: Any) -> Tensor | None:
    both = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str) or not _activations(*both):
        return None  # torch's other spelling, by lists of numbers, is left alone
    if len(both) == 1:
        return None
    if len(both) > 2:
        raise einsum.refused(equation, f"it multiplies {len(both)} tensors")
    a, b = _cast(*both)
    return einsum.einsum(equation, a, b, _named(site, "einsum", number))


def _named(site: Site, operation: str, number: int) -> Site:
    return replace(site, name=f"{operation}{number}")


SDPA = Operation(name="scaled_dot_product_attention", counted="einsum", products=2, handler=_sdpa)
MATMUL = Operation(name="matmul", counted="dot_general", products=1, handler=_matmul)
BMM = Operation(name="matmul", counted="dot_general", products=1, handler=_bmm)
BADDBMM = Operation(name="matmul", counted="dot_general", products=1, handler=_baddbmm)
EINSUM = Operation(name="einsum", counted="einsum", products=1, handler=_einsum)

# `a @ b` arrives as Tensor.matmul.
OPERATIONS: dict[Any, Operation] = {
    F.scaled_dot_product_attention: SDPA,
    torch.matmul: MATMUL,
    torch.Tensor.matmul: MATMUL,
    torch.Tensor.__matmul__: MATMUL,
    torch.linalg.matmul: MATMUL,
    torch.bmm: BMM,
    torch.Tensor.bmm: BMM,
    torch.mm: BMM,
    torch.Tensor.mm: BMM,
    torch.baddbmm: BADDBMM,
    torch.Tensor.baddbmm: BADDBMM,
    torch.einsum: EINSUM,
}

"""A linear product with a weight that has a low-rank branch: that with its residual, and two narrow ones beside it.

At rank 32 the two are 2 % of the multiplications of a layer with 3072 inputs and outputs. So passes over activations
and results count, and new memory for them more: the second factor is multiplied into the results, where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from ..core import Packed
from . import fp32_gemm
from .cpu import narrow
from .dispatch_guard import plain, seen
from .large_pages import in_large_pages
from .layer_parts import usable_parts
from .workspace import scratch

if TYPE_CHECKING:
    from torch import Tensor

    from ..core import LowRank, PackedSpec
    from .base import Prepared

Multiply = Callable[[Packed, "Tensor", "Tensor | None"], "Tensor"]


def linear(
    branch: LowRank,
    parts: Mapping[str, Tensor],
    x: Tensor,
    bias: Tensor | None,
    multiply: Callable[..., Tensor],
    *,
    is_rounded: bool = False,
) -> Tensor:
    """Multiply x [..., in] by the transposed weight and add the bias: [..., out] in x's dtype.

    Args:
        parts: those that `branch` names. multiply: adds the bias to the product with the residual, of inputs [..., in],
            and returns new memory.
        is_rounded: whether that product is in 8 bits, beside which 2^-16 of a float32 does not matter.
    """
    inputs = _divided(x, parts[branch.smooth]) if branch.smooth else x
    if branch.rows:
        y = multiply(inputs, None).mul_(parts[branch.rows])
        y = y if bias is None else y.add_(bias)
    else:
        y = multiply(inputs, bias)
    down, up = parts[branch.down], parts[branch.up]
    to, of = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
    is_added = (
        plain(x)
        and not seen(x)
        and narrow.add_product(to, of, down, up, is_turned=branch.is_turned, in_halves=is_rounded)
    )
    if not is_added:
        _add_product(to, of, down.t() if branch.is_turned else down, up)
    return y


def _divided(x: Tensor, by: Tensor) -> Tensor:
    """Return x / by in x's dtype; where dtypes differ the quotient is in float32: of bfloat16, small factors would be
    zeros in float16."""
    is_recorded = torch.is_grad_enabled() and (x.requires_grad or by.requires_grad)
    if x.is_cpu and x.dtype == by.dtype and plain(x) and not seen(x) and not is_recorded:
        return torch.div(x, by, out=in_large_pages(torch.empty_like(x)))
    return (x / by).to(x.dtype)


def _add_product(y: Tensor, x: Tensor, down: Tensor, up: Tensor) -> None:
    """Add (x down) up^T to y [m, out], for x [m, in] of the same dtype.

    In float16 the product is summed in float32: an SVD puts all of the size into one of the factors, so that what is
    between them may be above the largest number of float16 where the result is not.
    """
    is_wide = x.dtype == torch.float16 or (x.is_cpu and fp32_gemm.is_profitable(x.dtype))
    dtype = torch.float32 if is_wide else x.dtype
    down, up = down.to(dtype), up.to(dtype)
    if dtype == x.dtype:
        y.addmm_(x @ down, up.t())
        return
    step = fp32_gemm.ROWS if x.is_cpu else max(len(x), 1)
    for start in range(0, len(x), step):
        some_x, some_y = x[start : start + step], y[start : start + step]
        between = scratch(some_x.shape, dtype, x.device).copy_(some_x) @ down
        some_y.copy_(scratch(some_y.shape, dtype, x.device).copy_(some_y).addmm_(between, up.t()))


class LinearWithBranch:
    """The same, prepared for a layer."""

    __slots__ = (
        "at_once",
        "branch",
        "columns",
        "dtype",
        "inner",
        "is_rounded",
        "multiply",
        "names",
        "own",
        "spec",
    )

    def __init__(
        self,
        spec: PackedSpec,
        branch: LowRank,
        prefix: str,
        dtype: torch.dtype,
        inner: Prepared | None,
        multiply: Multiply,
        at_once: Prepared | None,
        is_rounded: bool,
    ) -> None:
        """Prepare a product for activations of `dtype`.

        Args:
            spec: of the weight. prefix: of the parts' names among the layer's parameters.
            inner: the prepared product with the residual, if there is one.
            multiply: that product for what `inner` leaves to others.
            at_once: the prepared product with the whole weight, if there is one, for the rows that it takes.
            is_rounded: see `linear`.
        """
        self.spec, self.columns, self.dtype = spec, spec.shape[1], dtype
        self.branch, self.own = branch, branch.under(prefix)
        of_branch = (self.own.down, self.own.up, self.own.smooth, self.own.rows)
        self.names = {name: name for name in (*self.own.residual, *filter(None, of_branch))}
        self.inner, self.multiply = inner, multiply
        self.at_once, self.is_rounded = at_once, is_rounded

    def __call__(self, x: Tensor, own: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return [..., rows], computed from the layer's parameters; None if this does not apply."""
        if x.dtype is not self.dtype or x.requires_grad or not x.ndim or x.shape[-1] != self.columns:
            return None
        y = None if self.at_once is None else self.at_once(x, own)
        return self._by_parts(x, own) if y is None else y

    def _by_parts(self, x: Tensor, own: Mapping[str, Tensor | None]) -> Tensor | None:
        parts, bias = usable_parts(x, own, self.names), own.get("bias")
        if parts is None:
            return None

        def multiply(inputs: Tensor, bias: Tensor | None) -> Tensor:
            y = None if self.inner is None else self.inner(inputs, {**parts, "bias": bias})
            if y is None:
                residual = {name: parts[of] for name, of in zip(self.branch.residual, self.own.residual, strict=True)}
                y = self.multiply(Packed(spec=self.spec, parts=residual), inputs, bias)
            return y

        bias = bias if bias is None else bias.to(x.dtype)
        return linear(self.own, parts, x, bias, multiply, is_rounded=self.is_rounded)

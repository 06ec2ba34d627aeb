"""Count a network's matrix products, by their weight and number of activation rows.

Derived from the operations of a trace (`activation_memory`); of tensors only shapes count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product with a weight, or of two activations.

    Attributes:
        weight: the weight's name; None where there is none: products of attention.
        kind: "conv" for a convolution whose outputs see more than one place; else "linear".
        numbers: in the weight.
        rows: of activations: how often each number of the weight is multiplied. Of a convolution, the outputs of a
            channel; so rows * numbers are the multiply-adds.
        dtype: of the activations.
    """

    weight: str | None
    kind: str
    numbers: int
    rows: int
    dtype: torch.dtype


@dataclass
class Work:
    """The operations counted so far.

    Attributes:
        products: number of calls of each.
        others: number of operations that are not products and allocate a tensor. made: the bytes of these.
    """

    products: Counter[Product] = field(default_factory=Counter)
    others: int = 0
    made: int = 0

    def add(self, done: Product | None, nbytes: int) -> None:
        """Count one more operation, which has allocated `made` bytes."""
        if done is not None:
            self.products[done] += 1
        elif nbytes:
            self.others += 1
            self.made += nbytes


def product(func: Any, args: Any, out: Any, weight: str | None) -> Product | None:
    """Return the product that an operation computes; None if it is not a product.

    Args:
        func: the overload of aten. args, out: its arguments and result.
        weight: name of the weight among its tensors, if there is one.
    """
    shape = _SHAPES.get(func.overloadpacket)
    if shape is None:
        return None
    numbers, rows = shape(args, out)
    patches = func.overloadpacket is aten.convolution and math.prod(args[1].shape[2:]) > 1
    return Product(weight=weight, kind="conv" if patches else "linear", numbers=numbers, rows=rows, dtype=args[0].dtype)


def _matrices(a: Any, b: Any) -> tuple[int, int]:
    """Return (numbers, rows) of a [..., M, K] times b [..., K, N], where a batch of b counts as one wide weight.

    A b that the batch shares (torch multiplies some views like this) has stride 0 in that dimension.
    """
    shared = math.prod(n for n, step in zip(b.shape, b.stride(), strict=True) if step == 0)
    return math.prod(b.shape) // max(shared, 1), a.shape[-2] * shared


def _convolution(args: Any, out: Any) -> tuple[int, int]:
    x, weight, transposed = args[0], args[1], args[6]
    places = x if transposed else out  # a transposed one multiplies each input with every number
    return weight.numel(), len(places) * math.prod(places.shape[2:])


def _attention(args: Any, out: Any) -> tuple[int, int]:
    """Return (numbers, rows) of query [..., M, D], key and value [..., N, D]: each query row meets all of both."""
    query, key, value = args[:3]
    return key.numel() + value.numel(), query.shape[-2]


_SHAPES: dict[Any, Callable[[Any, Any], tuple[int, int]]] = {
    aten.mm: lambda args, out: _matrices(args[0], args[1]),
    aten.bmm: lambda args, out: _matrices(args[0], args[1]),
    aten.addmm: lambda args, out: _matrices(args[1], args[2]),
    aten.baddbmm: lambda args, out: _matrices(args[1], args[2]),
    aten.convolution: _convolution,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
}

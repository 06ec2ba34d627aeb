"""What a network computes: its products, by the weight that they are with and how many rows of numbers it sees.

Told from operations as a trace sees them (`activations`); of tensors only shapes count.
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
    """What was computed so far.

    Attributes:
        products: how often each.
        others: operations that are no products and make a tensor. made: the bytes of these.
    """

    products: Counter[Product] = field(default_factory=Counter)
    others: int = 0
    made: int = 0

    def add(self, done: Product | None, made: int) -> None:
        """Count one more operation, which has made so many bytes."""
        if done is not None:
            self.products[done] += 1
        elif made:
            self.others += 1
            self.made += made


def product(func: Any, args: Any, out: Any, weight: str | None) -> Product | None:
    """What an operation computes; None if it is no product.

    Args:
        func: the overload of aten. args, out: its arguments and result.
        weight: the name of that of its tensors which is one.
    """
    shape = _SHAPES.get(func.overloadpacket)
    if shape is None:
        return None
    numbers, rows = shape(args, out)
    patches = func.overloadpacket is aten.convolution and math.prod(args[1].shape[2:]) > 1
    return Product(weight=weight, kind="conv" if patches else "linear", numbers=numbers, rows=rows, dtype=args[0].dtype)


def _matrices(a: Any, b: Any) -> tuple[int, int]:
    """a [..., M, K] times b [..., K, N], each of a batch with one of its own: as if side by side in one weight. One b
    that all of a batch share, which is how torch multiplies with some views, has stride 0 there."""
    shared = math.prod(n for n, step in zip(b.shape, b.stride(), strict=True) if step == 0)
    return math.prod(b.shape) // max(shared, 1), a.shape[-2] * shared


def _convolution(args: Any, out: Any) -> tuple[int, int]:
    x, weight, transposed = args[0], args[1], args[6]
    places = x if transposed else out  # a transposed one multiplies each input with every number
    return weight.numel(), len(places) * math.prod(places.shape[2:])


def _attention(args: Any, out: Any) -> tuple[int, int]:
    """query [..., M, D], key and value [..., N, D]: each row of the query meets all of both."""
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

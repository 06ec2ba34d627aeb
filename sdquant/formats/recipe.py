"""How a tensor that a file does not hold is made of those that it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.packed_rows import Range, pieces

Get = Callable[[str], Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a tensor is made of others.

    Attributes:
        sources: the names of those.
        rows: ranges of rows of the only source, if the tensor is nothing but these; else None.
        shape, dtype: of the result.
        make: computes it; gets a function that gives a source by name.
    """

    sources: tuple[str, ...]
    rows: tuple[Range, ...] | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[Get], Tensor]

    def __call__(self, get: Get) -> Tensor:
        """The tensor."""
        if self.rows is not None:
            return pieces(get(self.sources[0]), self.rows)
        return self.make(get)

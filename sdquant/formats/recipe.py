"""Recipes for tensors that a file does not contain, computed from those that it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.packed_rows import Range, pieces

Get = Callable[[str], Tensor]


@dataclass(frozen=True)
class Recipe:
    """A tensor computed from other tensors.

    Attributes:
        sources: the names of those.
        rows: ranges of rows of the only source, if the tensor consists of these alone; else None.
        shape, dtype: of the result.
        make: computes it; is passed a function that returns a source by name.
    """

    sources: tuple[str, ...]
    rows: tuple[Range, ...] | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[Get], Tensor]

    def __call__(self, get: Get) -> Tensor:
        """Return the tensor; `get` returns a source by name."""
        if self.rows is not None:
            return pieces(get(self.sources[0]), self.rows)
        return self.make(get)

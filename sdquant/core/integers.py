"""Weights whose codes stand for 8-bit integers, which are expanded for one product (`Backend.integers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .backend import Packed


class Integers(Protocol):
    """What expands one weight."""

    def __call__(self) -> Packed:
        """Return the weight as 8-bit integers and a scale per row. It is in the workspace."""
        ...

    def decoded(self, dtype: torch.dtype) -> Tensor | None:
        """Return the values of these, [out, in] in `dtype` and still rotated, in one pass over the codes; None where
        no kernel does that. They are in the workspace."""
        ...

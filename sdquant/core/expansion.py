"""Weights whose codes stand for 8-bit integers, which are expanded for one product (`Backend.integers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_Weight = TypeVar("_Weight", covariant=True)  # a `Packed`, whose module imports this one


class Expansion(Protocol[_Weight]):
    """The expansion of one weight. Its results are in the workspace."""

    def __call__(self) -> _Weight:
        """Return the weight as 8-bit integers and a scale per row."""
        ...

    def decoded(self, dtype: torch.dtype) -> Tensor | None:
        """Return the values of these, [out, in] in `dtype` and still rotated, in one pass over the codes; None where
        no kernel does that."""
        ...

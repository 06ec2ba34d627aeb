"""Weights whose codes stand for 8-bit integers, which are expanded for one product (`Backend.integers`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_Weight = TypeVar("_Weight", covariant=True)  # a `Packed`, whose module imports this one


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpansionParts:
    """Names of the parts that `kernels.expand_rows` takes, for kernels that are bound to a layer's weight.

    Attributes:
        bits: of a code. table: of the values of codes; "" for `levels`, float32 [16] on the weight's device, or for
            codes of 6 bits, which have none.
    """

    bits: int
    codes: str
    scale: str
    channel: str
    table: str = ""
    levels: Tensor | None = None


class Expansion(Protocol[_Weight]):
    """The expansion of one weight. Its results are in the workspace."""

    def __call__(self) -> _Weight:
        """Return the weight as 8-bit integers and a scale per row."""
        ...

    def decoded(self, dtype: torch.dtype) -> Tensor | None:
        """Return the values of these, [out, in] in `dtype` and still rotated, in one pass over the codes; None where
        no kernel does that."""
        ...

    def sources(self) -> ExpansionParts:
        """Return which parts are expanded."""
        ...

"""The low-rank branch beside a packed weight, as SVDQuant and SDNQ's SVD have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A weight W = rows R / smooth + up down^T, so that x W^T = (x / smooth) R^T rows + (x down) up^T.

    Attributes:
        residual: the parts of R, a packed weight of the same description as W.
        smooth: divides the inputs, [in]; None for 1. down: [in, rank]. up: [out, rank].
        rows: multiplies the outputs of R, [out]; None for ones.
    """

    residual: Mapping[str, Tensor]
    smooth: Tensor | None
    down: Tensor
    up: Tensor
    rows: Tensor | None = None

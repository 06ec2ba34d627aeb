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

    def add_product(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y + (x down) up^T, for y [..., out] and x [..., in] of one dtype.

        In float16 the product is summed in float32: an SVD puts all of the size into one of the factors, so that what
        is between them may be above the largest number of float16 where the result is not.
        """
        import torch

        dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
        down, up = self.down.to(dtype), self.up.to(dtype)
        narrow = x.reshape(-1, x.shape[-1]).to(dtype) @ down
        return torch.addmm(y.reshape(-1, y.shape[-1]).to(dtype), narrow, up.T).to(y.dtype).view(y.shape)

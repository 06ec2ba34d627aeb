"""Making SVDQuant's parts: the smoothing factors, the low-rank branch, and what it leaves for 4 bits.

A weight W is R / smooth + up down^T (`core.low_rank`). R and the branch are of the smoothed weight W * smooth: the
branch is its largest singular values, and R, what is left, has smaller numbers. Method: SVDQuant (arXiv 2411.05007)
without its searches; smoothing is SmoothQuant's with an exponent of 1/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import TensorSpec, Unfit
from ._comfy_codec import require_matrix

if TYPE_CHECKING:
    from ..core import QuantSpec

_SEED, _MORE, _ROUNDS = 0, 8, 4  # of the random start of the SVD; columns beside the rank; steps towards the largest
_SHARE = 0.7  # of the weight's size that a branch may have: with the codes it is smaller than the weight
_LEAST = 1e-5  # of the largest magnitude, which the magnitudes of inputs count as at least


@dataclass(frozen=True)
class Branch:
    """What stands beside R, in the dtype of the file's floats: smooth [in], down [in, rank], up [out, rank]."""

    smooth: Tensor
    down: Tensor
    up: Tensor

    @property
    def parts(self) -> dict[str, Tensor]:
        """The fields as parts of a packed weight."""
        return {"smooth": self.smooth, "down": self.down, "up": self.up}

    def left_of(self, weight: Tensor) -> Tensor:
        """Return R of the whole weight, with these factors as they are rounded: float32 [out, in]."""
        left = torch.addmm(weight.float(), self.up.float(), self.down.float().T, alpha=-1)
        return left.mul_(self.smooth.float())


def layout(spec: QuantSpec, shape: tuple[int, ...], dtype: str, group: int) -> dict[str, TensorSpec]:
    """Return the parts beside scales: codes in half bytes and the branch.

    Raises:
        Unfit: the weight is no matrix of whole groups, or too small for such a branch.
    """
    require_matrix(shape, dtype)
    rows, columns = shape
    rank = spec["rank"]
    if columns % group:
        raise Unfit(f"it has {columns} inputs, and {spec.scheme} needs a multiple of {group}")
    if rank * (rows + columns) > _SHARE * rows * columns:
        raise Unfit(f"with a branch of rank {rank} a weight of {list(shape)} would hardly be smaller")
    floats = factor_dtype(dtype)
    return {
        "codes": TensorSpec(dtype="uint8", shape=(rows, columns // 2)),
        "smooth": TensorSpec(dtype=floats, shape=(columns,)),
        "down": TensorSpec(dtype=floats, shape=(columns, rank)),
        "up": TensorSpec(dtype=floats, shape=(rows, rank)),
    }


def factor_dtype(dtype: str) -> str:
    """Return the dtype of the factors of a weight: of 16 bits, since kernels for them have no other."""
    return "float16" if dtype == "float16" else "bfloat16"


def branch_of(weight: Tensor, rank: int, dtype: torch.dtype, magnitudes: Tensor | None) -> Branch:
    """Return the branch of a weight [out, in].

    Args:
        magnitudes: of the inputs, [in], by which they are smoothed; None for no smoothing.
    """
    values = weight.float()
    smooth = torch.ones_like(values[0]) if magnitudes is None else _smoothing(values, magnitudes.to(values.device))
    smooth = smooth.clamp(max=torch.finfo(dtype).max).to(dtype)
    up, down = _largest_part(values * smooth.float(), rank)
    return Branch(smooth, (down / smooth.float().unsqueeze(1)).to(dtype).contiguous(), up.to(dtype).contiguous())


def _smoothing(weight: Tensor, magnitudes: Tensor) -> Tensor:
    """Return sqrt(magnitudes of inputs / those of the weight's columns), of geometric mean 1."""
    inputs, columns = (_positive(one.float()) for one in (magnitudes, weight.abs().amax(dim=0)))
    smooth = (inputs / columns).sqrt_()
    return smooth.div_(smooth.log().mean().exp())


def _positive(values: Tensor) -> Tensor:
    largest = values.max()
    return torch.where(largest > 0, values.clamp(min=float(largest) * _LEAST), torch.ones_like(values))


def _largest_part(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return up [out, rank] and down [in, rank] with up down^T the part of the largest singular values, each with the
    roots of these.

    Random vectors, multiplied with the matrix and its transpose a few times, span that part nearly (Halko et al., arXiv
    0909.4061): a few hundredths of a dB below the exact SVD, in a second instead of minutes. They are always the same
    ones.
    """
    rows, columns = matrix.shape
    count = min(rank + _MORE, rows, columns)
    if not bool(torch.isfinite(matrix).all()):  # the scales of the codes show that
        return matrix.new_zeros(rows, rank), matrix.new_zeros(columns, rank)
    start = torch.randn(
        columns, count, generator=torch.Generator().manual_seed(_SEED), dtype=matrix.dtype, device="cpu"
    )
    basis = torch.linalg.qr(matrix @ start.to(matrix.device)).Q
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    left, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    roots = values[:rank].sqrt()
    return basis @ (left[:, :rank] * roots), right[:rank].T * roots

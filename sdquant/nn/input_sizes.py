"""Check input shapes: a mismatch raises torch's own error, as in the float layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_CONVOLUTIONS: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)


def require_fit(x: Tensor, shape: Sequence[int], groups: int = 1) -> None:
    """Raise torch's RuntimeError if an input does not fit a layer.

    Kernels would reshape it, and raise errors about other shapes.

    Args:
        x: [..., in] for a linear layer, [b, in, ...] or [in, ...] for a convolution.
        shape: of the weight, [out, in] or [out, in / groups, ...].
    """
    if len(shape) == 2:
        if x.ndim == 0 or x.shape[-1] != shape[1]:
            F.linear(_like(x.shape), _like(shape))
    elif x.ndim not in (len(shape), len(shape) - 1) or x.shape[1 - len(shape)] != shape[1] * groups:
        _CONVOLUTIONS[len(shape) - 3](_like(x.shape), _like(shape), groups=groups)


def _like(shape: Sequence[int]) -> Tensor:
    """Return a tensor of a shape with one element in memory: torch checks shapes before it computes."""
    return torch.zeros(()).expand(tuple(shape))

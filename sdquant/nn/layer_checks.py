"""Check the inputs of layers as torch's float layers do, and warn about casts, which change only what is not packed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import dtype_name

log = logging.getLogger(__name__)

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
    return torch.zeros((), dtype=torch.float32, device="cpu").expand(tuple(shape))


@cache
def warn_of_cast(before: torch.dtype, after: torch.dtype) -> None:
    """Log what a cast of a quantized layer from one dtype to another means, once per process for each pair.

    diffusers refuses `to(dtype)` on models of its own quantizers. Here it works, since layers compute in any dtype; but
    all that is not packed changes, and a pipeline's VAE and float layers may take twice the memory.
    """
    old, new = (dtype_name(dtype) for dtype in (before, after))
    if after.itemsize > before.itemsize:
        effect = "takes more memory"
    else:
        effect = "loses precision" if after.itemsize < before.itemsize else "has another range"
    log.warning(
        "A quantized model was cast from %s to %s: its packed weights do not change, but everything else "
        "(biases, norms, unquantized layers) %s. To use %s from the start, load the model with dtype=%r",
        old, new, effect, new, new,
    )  # fmt: skip


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Return the sizes and settings of a layer, by attribute, without those that every module has."""
    hidden = ("_reversed_padding_repeated_twice",)  # a convolution's, for padding that is not zeros
    return {k: v for k, v in module.__dict__.items() if not k.startswith("_") or k in hidden}

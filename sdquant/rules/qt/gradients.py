"""Quantization of gradients: Qwix at aa623acb, core/dot_general_qt.py and core/stochastic_rounding.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import SettingsError
from ..core.how_to_quantize import HowToQuantize
from ..core.qarray import QArray, quantize

if TYPE_CHECKING:
    from ..qconfig import QtRule

STEPS = 256  # of low_bit_uniform: as many as a byte has


def quantized(
    gradient: Tensor,
    rule: QtRule,
    channelwise: Sequence[int],
    *,
    dtype: torch.dtype,
    tiles: dict[int, int | float] | None = None,
    noise: Callable[[torch.Size], Tensor] | None = None,
) -> QArray:
    """Quantize a gradient to rule.bwd_qtype.

    Args:
        channelwise: axes with a scale for each index, unless the rule has one scale for all.
        dtype: of the product; the gradient may be in that of its scales.
        tiles, noise: see `HowToQuantize`.
    """
    assert rule.bwd_qtype is not None
    how = HowToQuantize(
        qtype=rule.bwd_qtype,
        channelwise_axes=() if rule.disable_channelwise_axes else tuple(channelwise),
        tiled_axes=tiles or {},
        calibration_method=rule.bwd_calibration_method,
        noise=noise,
    )
    return replace(quantize(gradient, how), dtype=dtype)


def shard(size: int, shards: int, whose: str, what: str) -> int:
    """Return how many of the `size` rows of a weight's gradient are in each shard.

    Raises:
        SettingsError: they cannot be divided.
    """
    if size % shards:
        raise SettingsError(
            f"Cannot sum the gradient of {whose} in {shards} shards (bwd_weight_grad_shards, or MaxDiffusion's "
            "quantization_local_shard_count)",
            f"its {what} not a multiple of that",
            "Choose a number that divides the batch",
        )
    return size // shards


def noise_of(
    rule: QtRule, gradient: Tensor, generator: torch.Generator | None = None
) -> Callable[[torch.Size], Tensor] | None:
    """Return the noise of stochastic rounding for a gradient of this shape and device; None if the rule has none.

    It is the same along all axes but rule.channelwise_noise_axes, and new at each call: from `generator`, or from the
    device's default generator, so that `torch.manual_seed` makes a run repeatable. The result has the requested shape,
    which may be the gradient's with axes flattened.
    """
    kind = rule.bwd_stochastic_rounding
    if kind is None:
        return None
    full = gradient.shape
    axes = {axis % len(full) for axis in rule.channelwise_noise_axes if -len(full) <= axis < len(full)}
    narrow = [size if axis in axes else 1 for axis, size in enumerate(full)]

    def draw(shape: torch.Size) -> Tensor:
        if kind == "uniform":
            noise = torch.rand(narrow, generator=generator, dtype=torch.float32, device=gradient.device) - 0.5
        else:
            steps = torch.randint(STEPS, narrow, generator=generator, device=gradient.device)
            noise = (steps.float() + 0.5) / STEPS - 0.5
        return noise if len(shape) == len(full) else noise.expand(full).reshape(shape)

    return draw

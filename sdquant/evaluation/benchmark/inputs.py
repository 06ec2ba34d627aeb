"""Inputs captured from a pipeline for a benchmark's UNet or transformer, and the comparison of its outputs.

Without a pipeline, `sdquant.models.dummy_inputs` makes the inputs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ...models import Inputs, dummy_inputs
from ...utils.byte_sizes import size as readable
from ...utils.metrics import decibels

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)


class _Caught(Exception):
    """Raised to stop the pipeline once its inputs are captured."""


def of_pipeline(pipe: Any, prompt: str, size: tuple[int, int] | None, seed: int) -> tuple[Inputs, tuple[int, int]]:
    """Return the inputs of the UNet or transformer at the pipeline's first step, on the CPU, and the image's size.

    Raises:
        SdquantError: as `generate.draw`.
    """
    from ...models import draw, main_part, native_size

    caught: list[Inputs] = []

    def catch(_: nn.Module, args: tuple[Any, ...], values: dict[str, Any]) -> None:
        with torch.no_grad():
            caught.append(
                (dummy_inputs.moved(args, torch.device("cpu")), dummy_inputs.moved(values, torch.device("cpu")))
            )
        raise _Caught

    width, height = size or (native_size(pipe), native_size(pipe))
    handle = main_part(pipe).register_forward_pre_hook(catch, with_kwargs=True)
    try:
        draw(pipe, [prompt], seeds=[seed], steps=1, width=width, height=height)
    except _Caught:
        pass
    finally:
        handle.remove()
    return caught[0], (width, height)


def batch_of(inputs: Inputs) -> int:
    """Return the batch size: dim 0 of the first tensor with more than one dimension, or 1."""
    args, values = inputs
    first = next((one for one in (*args, *values.values()) if isinstance(one, torch.Tensor) and one.ndim > 1), None)
    return 1 if first is None else int(first.shape[0])


def output(result: Any) -> Tensor:
    """Return the output tensor of a UNet or transformer, float64 on the CPU."""
    tensor = result[0] if isinstance(result, tuple) else result.sample
    assert isinstance(tensor, torch.Tensor)
    log.debug("the output is %s, %s", list(tensor.shape), readable(tensor.numel() * tensor.element_size()))
    return tensor.detach().to("cpu", torch.float64)


def snr(actual: Tensor, expected: Tensor) -> float:
    """Return an output's signal-to-noise ratio in dB: 10 log10(sum expected^2 / sum (actual - expected)^2).

    It is infinite if both are equal.
    """
    return decibels(float((expected**2).sum()), float(((actual - expected) ** 2).sum()))

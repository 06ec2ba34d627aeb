"""What a benchmark's UNet or transformer is given by its own pipeline, and what it puts out.

Where there is no pipeline, `sdquant.models.dummy_inputs` makes inputs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ...models.dummy_inputs import Inputs, moved
from ...utils.byte_sizes import size as readable

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)


class _Caught(Exception):
    """The inputs are there: the pipeline need not go on."""


def of_pipeline(pipe: Any, prompt: str, size: tuple[int, int] | None, seed: int) -> tuple[Inputs, tuple[int, int]]:
    """What the pipeline gives its UNet or transformer at the first step, on the CPU, and the image's size.

    Raises:
        SdquantError: as `drawing.draw`.
    """
    from ...models.generate import draw, native_size
    from ...models.pipelines import main_part

    caught: list[Inputs] = []

    def catch(_: nn.Module, args: tuple[Any, ...], values: dict[str, Any]) -> None:
        with torch.no_grad():
            caught.append((moved(args, torch.device("cpu")), moved(values, torch.device("cpu"))))
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
    """Rows of the first tensor that has any."""
    args, values = inputs
    first = next((one for one in (*args, *values.values()) if isinstance(one, torch.Tensor) and one.ndim > 1), None)
    return 1 if first is None else int(first.shape[0])


def output(result: Any) -> Tensor:
    """The tensor that a UNet or transformer puts out, float64 on the CPU."""
    made = result[0] if isinstance(result, tuple) else result.sample
    assert isinstance(made, torch.Tensor)
    log.debug("the output is %s, %s", list(made.shape), readable(made.numel() * made.element_size()))
    return made.detach().to("cpu", torch.float64)


def snr(made: Tensor, wanted: Tensor) -> float:
    """Signal-to-noise ratio of an output in dB: 10 log10(sum wanted^2 / sum (made - wanted)^2); infinite if equal."""
    noise = float(((made - wanted) ** 2).sum())
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10((wanted**2).sum() / noise))

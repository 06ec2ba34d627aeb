"""How much noise in each row of each weight changes the output of a model: gradients of random sums of the output."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..rules import QuantStat

GRADIENT = "gradient2"


def add_gradients(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any], stats: Mapping[str, QuantStat], seed: str
) -> None:
    """Call a model once more, and add for each layer the squared norm of each row of the gradient of (v . y) / |y| by
    its weight, where y is the output and v standard normal.

    Args:
        stats: by the layer's path. seed: what v depends on.
    """
    weights = {path: model.get_submodule(path).get_parameter("weight") for path in stats}
    squares: dict[str, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(_checkpointing(model))
        stack.enter_context(torch.enable_grad())
        for path, weight in weights.items():
            stack.enter_context(_watched(weight, _adder(squares, path)))
        outputs = [one for one in _tensors(model(*args, **kwargs)) if one.requires_grad]
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        total: Any = 0.0
        for one in outputs:
            noise = torch.randn(one.shape, generator=generator).to(one.device)
            total = total + (noise * one.float()).sum() / one.detach().float().norm().clamp(min=1e-30)
        if outputs:
            total.backward()
    for path, weight in weights.items():
        stats[path].add({GRADIENT: squares.get(path, torch.zeros(len(weight)))})


def _adder(squares: dict[str, Tensor], path: str) -> Callable[[Tensor], None]:
    def add(weight: Tensor) -> None:
        if weight.grad is not None:
            squares[path] = weight.grad.float().flatten(1).square().sum(1).cpu()
            weight.grad = None  # no model has room for the gradients of all its weights

    return add


@contextmanager
def _watched(weight: nn.Parameter, add: Callable[[Tensor], None]) -> Iterator[None]:
    before, gradient = weight.requires_grad, weight.grad
    weight.grad = None
    weight.requires_grad_(True)
    hook = weight.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hook.remove()
        weight.requires_grad_(before)
        weight.grad = gradient


@contextmanager
def _checkpointing(model: nn.Module) -> Iterator[None]:
    """Keep the activations of block boundaries only, where diffusers can: a model with all of them fits no memory."""
    can = getattr(model, "_supports_gradient_checkpointing", False) and hasattr(model, "enable_gradient_checkpointing")
    if not can or getattr(model, "is_gradient_checkpointing", True):
        yield
        return
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    try:
        yield
    finally:
        model.disable_gradient_checkpointing()  # type: ignore[operator]


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors of a model's output. Of text encoders, not the hidden states of all layers beside the last."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    values = list(output.values()) if isinstance(output, Mapping) else output
    if not isinstance(values, (list, tuple)):
        return []
    top = [one for one in values if isinstance(one, Tensor) and one.is_floating_point()]
    return top or [one for value in values for one in _tensors(value)]

"""How much noise in each row of each weight changes the output of a model: gradients of random sums of the output."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import rng
from .input_moments import MAX_ROWS, chosen_rows

if TYPE_CHECKING:
    from ..rules import QuantStat

GRADIENT = "gradient2"
# What each of `input_rows` counts for, by the shape of the input: float32 [rows].
Places = dict[tuple[int, ...], Tensor]


def add_gradients(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any], stats: Mapping[str, QuantStat], seed: str
) -> dict[str, Places]:
    """Call a model once more, and add for each layer the squared norm of each row of the gradient of (v . y) / |y| by
    its weight, where y is the output and v standard normal.

    Args:
        stats: by the layer's path. seed: what v depends on.

    Returns:
        What each row of a layer's inputs, a token or the patch of a pixel, counts for, by path: the squared norm of the
        gradient by the layer's output there.
    """
    places: dict[str, Places] = {path: {} for path in stats}
    weights = {path: model.get_submodule(path).get_parameter("weight") for path in stats}
    squares: dict[str, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(_checkpointing(model))
        stack.enter_context(torch.enable_grad())
        for path, weight in weights.items():
            stack.enter_context(_watched(weight, _adder(squares, path)))
            stack.callback(model.get_submodule(path).register_forward_hook(_placer(places[path])).remove)
        outputs = [one for one in _tensors(model(*args, **kwargs)) if one.requires_grad]
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(seed.encode()))
        total: Any = 0.0
        for one in outputs:
            noise = rng.normal(generator, one.shape).to(one.device)
            total = total + (noise * one.float()).sum() / one.detach().float().norm().clamp(min=1e-30)
        if outputs:
            total.backward()
    for path, weight in weights.items():
        stats[path].add({GRADIENT: squares.get(path, torch.zeros(len(weight), dtype=torch.float32, device="cpu"))})
    return places


def _placer(places: Places) -> Callable[[nn.Module, Any, Tensor], None]:
    def watch(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad and args:
            shape = tuple(args[0].shape)
            output.register_hook(lambda gradient: add(module, shape, gradient))  # type: ignore[no-untyped-call]

    def add(module: nn.Module, shape: tuple[int, ...], gradient: Tensor) -> None:
        groups = 1
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            batched = gradient if gradient.ndim == module.weight.ndim else gradient[None]
            gradient, groups = batched.movedim(1, -1), module.groups
        gradient = gradient.reshape(-1, groups, gradient.shape[-1] // groups)
        some = gradient[chosen_rows(len(gradient), MAX_ROWS, gradient.device)]
        squares = some.float().square().sum(2).flatten()
        places[shape] = squares + places[shape] if shape in places else squares

    return watch


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

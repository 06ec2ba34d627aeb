"""Tensors that outlive torch's inference mode: `ordinary`, `make_ordinary`. Importing this module imports no torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

_P = ParamSpec("_P")
_T = TypeVar("_T")


def ordinary(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have a function make ordinary tensors when it is called in inference mode, too, where programs may well load a
    model. What is made in that mode can be written to, computed with and trained with only there, or not at all, while
    weights and buffers outlive the call that made them."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        import torch

        with torch.inference_mode(False), torch.no_grad():  # the first by itself would turn gradients on
            return function(*args, **kwargs)

    return call


def make_ordinary(*modules: nn.Module) -> None:
    """Exchange weights and buffers that were made in inference mode for ordinary copies, one tensor at a time; what is
    tied, within a module or between them, stays so.

    Raises:
        SettingsError: one of them is of a library's own class of tensors.
    """
    import torch

    from ..errors import SettingsError

    copies: dict[int, Tensor] = {}
    for path, part in (pair for module in modules for pair in module.named_modules()):
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_inference():
                    continue
                if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                    raise SettingsError(
                        f"Weight {f'{path}.{name}'.lstrip('.')} was to be moved",
                        f"it is a {type(tensor).__name__} that was made in torch.inference_mode(), which cannot be",
                        "Make the model outside of it; sdquant.load_model may be called inside",
                    )
                if id(tensor) not in copies:
                    copy = tensor.detach().clone()
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    copies[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_weight else copy
                held[name] = copies[id(tensor)]

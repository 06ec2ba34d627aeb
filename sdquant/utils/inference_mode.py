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
    """Decorator: run outside `torch.inference_mode()`, so that the tensors created can be modified and trained later.

    Programs may load a model inside that mode. Tensors created there are restricted outside of it, while weights and
    buffers outlive the call that created them."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        import torch

        with torch.inference_mode(False), torch.no_grad():  # the first by itself would turn gradients on
            return function(*args, **kwargs)

    return call


def make_ordinary(*modules: nn.Module) -> None:
    """Replace weights and buffers created in inference mode by ordinary copies, one tensor at a time. Tied tensors,
    within a module or between modules, stay tied.

    Raises:
        SettingsError: one of them is an instance of a library's own tensor class.
    """
    import torch

    from ..errors import SettingsError

    copies: dict[int, Tensor] = {}
    for path, part in (pair for module in modules for pair in module.named_modules()):
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_inference():
                    continue
                if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                    raise SettingsError(
                        f"Cannot move weight {f'{path}.{name}'.lstrip('.')}",
                        f"it is a {type(tensor).__name__} created in torch.inference_mode(), which cannot be copied",
                        "Build the model outside inference mode; sdquant.load_model may be called inside it",
                    )
                if id(tensor) not in copies:
                    copy = tensor.detach().clone()
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    copies[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_weight else copy
                tensors[name] = copies[id(tensor)]

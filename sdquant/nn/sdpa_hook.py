"""Which attention runs inside a model's attention modules: `kernels.attention` is asked before torch.

Modules call `torch.nn.functional.scaled_dot_product_attention`, by whatever way their library has; inside their forward
that call is looked for. Forward hooks would not do: torch does not call them where Ctrl-C ends a forward. Nor would the
marks of `rules.interception`: they take a module out of compiled graphs, which is too much for what is only faster.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from ..kernels.dispatch_guard import seen
from ..kernels.sdpa import replacement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


# Numbers in the input of an attention module from which on it pays to look at the calls in it, which costs some 0.1 ms:
# 1024 tokens of SD1.5's first blocks, 256 of SDXL's last.
LEAST = 1 << 18


class _Asking(TorchFunctionMode):
    """In this thread, while it is entered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead, kwargs = replacement(func), kwargs or {}
        found = None if instead is None else instead(*args, **kwargs)
        return func(*args, **kwargs) if found is None else found


class _Forward:
    """The forward of a module that asks: an attribute of the module itself, in the place of its class's."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward = module, type(module).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # a compiled graph has torch's; and the compiler does not know the expression below
            return self.forward(self.module, *args, **kwargs)
        forward = type(self.module).forward  # of now: web UIs replace those of classes
        x = args[0] if args else kwargs.get("hidden_states")
        if isinstance(x, Tensor) and (x.numel() < LEAST or seen(x)):
            return forward(self.module, *args, **kwargs)
        with _Asking():
            return forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """For who looks which arguments a module takes."""
        return inspect.signature(type(self.module).forward.__get__(self.module))


def ask(model: nn.Module, on: bool) -> None:
    """Have the attention modules of a model ask for a faster attention, or ask no more. A module whose forward is
    somebody else's is left alone: they may want to take it off again."""
    for module in _modules(model):
        own = module.__dict__.get("forward")
        if on and own is None:
            module.__dict__["forward"] = _Forward(module)
        elif not on and isinstance(own, _Forward):
            del module.__dict__["forward"]


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules whose class is named so, as diffusers' and transformers' are."""
    for module in model.modules():
        if _named(module) and not any(_named(child) for child in module.modules() if child is not module):
            yield module


def _named(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__

"""Replace the attention inside a model's attention modules by a faster kernel (`kernels.sdpa`), if there is one.

Modules call `torch.nn.functional.scaled_dot_product_attention` in different ways; that call is intercepted inside their
forward. Forward hooks do not work: torch does not call them when Ctrl-C ends a forward. Nor do the marks of
`rules.interception`: they exclude a module from compiled graphs, which a mere speed-up is not worth.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from ..kernels import dispatch_guard, sdpa

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


# Numbers in the input of an attention module from which on it pays to look at the calls in it, which costs some 0.1 ms:
# 1024 tokens of SD1.5's first blocks, 256 of SDXL's last.
LEAST = 1 << 18


class _Asking(TorchFunctionMode):
    """Intercepts the attention calls of this thread while it is entered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead, kwargs = sdpa.replacement(func), kwargs or {}
        output = None if instead is None else instead(*args, **kwargs)
        return func(*args, **kwargs) if output is None else output


class _Forward:
    """A module's forward with the interception: an instance attribute that replaces the class's forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward = module, type(module).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # a compiled graph has torch's; and the compiler does not know the expression below
            return self.forward(self.module, *args, **kwargs)
        forward = type(self.module).forward  # of now: web UIs replace those of classes
        x = args[0] if args else kwargs.get("hidden_states")
        if isinstance(x, Tensor) and (x.numel() < LEAST or dispatch_guard.seen(x)):
            return forward(self.module, *args, **kwargs)
        with _Asking():
            return forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the module's forward, for code that inspects its arguments."""
        return inspect.signature(type(self.module).forward.__get__(self.module))


def ask(model: nn.Module, on: bool) -> None:
    """Turn the faster attention of a model's attention modules on or off. A module whose forward another tool has
    replaced is skipped: that tool may want to restore it."""
    for module in _modules(model):
        own = module.__dict__.get("forward")
        if on and own is None:
            module.__dict__["forward"] = _Forward(module)
        elif not on and isinstance(own, _Forward):
            del module.__dict__["forward"]


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost modules with "Attention" in their class name, as in diffusers and transformers."""
    for module in model.modules():
        if _named(module) and not any(_named(child) for child in module.modules() if child is not module):
            yield module


def _named(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__

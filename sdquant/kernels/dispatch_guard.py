"""Guards around kernels, which torch's dispatcher does not see: `seen` says when a call must be a registered custom op,
and checks of kernels run `undisturbed` by the caller's settings.

Kernels read memory by its address. A traced graph would record their result as a constant, a dispatch mode would miss
the call, and a tensor without memory of its own would crash the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes

from . import flop_counts

if TYPE_CHECKING:
    from ..core import Packed

_modes = torch._C._len_torch_dispatch_stack
_traced = torch._C._get_tracing_state
_transformed = torch._C._functorch.peek_interpreter_stack
_PLAIN = (Tensor, nn.Parameter)


def seen(x: Tensor) -> bool:
    """Return whether a call with this tensor must go through a custom op: it is compiled, exported, traced
    (`torch.jit`), under a dispatch mode (fake tensors, `make_fx`, FLOP counters) or `transformed`, or the tensor is of
    a subclass."""
    if is_compiling():  # first: the compiler knows it, and none of the others
        return True
    if _modes() > 0:
        flop_counts.hand_over()
        return True
    return type(x) is not Tensor or _traced() is not None or transformed()


def transformed() -> bool:
    """Return whether a functional transform is active (`torch.func`, `torch.autograd.forward_ad`), which torch's own
    operations support and our custom ops do not. torch.compile cannot tell for `torch.func.grad` and `vmap`; it stops
    with an error at our ops there."""
    return forward_ad._current_level >= 0 or (not is_compiling() and _transformed() is not None)


def plain(x: Tensor) -> bool:
    """Return whether a tensor has memory that a kernel can read; a fake tensor claims to be on the CPU and has none."""
    return type(x) in _PLAIN


def require_beside(packed: Packed, x: Tensor) -> None:
    """Check that x is on the weight's device: kernels read memory by its address."""
    if x.device != packed.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but the input is on {x.device} and the quantized weight "
            f"({packed.spec.scheme}) on {packed.device}: move one of them, or load with an offload mode, which moves "
            "the weights"
        )


P = ParamSpec("P")


def undisturbed(check: Callable[P, bool]) -> Callable[P, bool]:
    """Decorator: run a check on the CPU, whatever the default device, outside `torch.autocast` and unseen by dispatch
    modes: its verdict is cached for calls outside of all of them, and a counter counts what the user computes."""

    @wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> bool:
        with torch.device("cpu"), torch.autocast("cpu", enabled=False), _disable_current_modes():
            return check(*args, **kwargs)

    return run

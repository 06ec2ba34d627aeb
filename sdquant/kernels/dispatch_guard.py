"""Whether a call has to be an operator of torch's, since something besides the result goes by it: `seen`.

Kernels read memory by its address. A graph that is made of a call would take what they give for a constant, a mode
would miss it, and a tensor that has no memory of its own would end the program.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

_modes = torch._C._len_torch_dispatch_stack
_traced = torch._C._get_tracing_state
_transformed = torch._C._functorch.peek_interpreter_stack
_PLAIN = (Tensor, nn.Parameter)


def seen(x: Tensor) -> bool:
    """Whether a call with this tensor is compiled, exported, traced (`torch.jit`), looked at by a dispatch mode (fake
    tensors, `make_fx`, counters of flops) or transformed (see there), or it is of a class of its own."""
    if is_compiling():  # first: the compiler knows it, and none of the others
        return True
    return type(x) is not Tensor or _modes() > 0 or _traced() is not None or transformed()


def transformed() -> bool:
    """Whether torch carries derivatives or batches along with values (`torch.func`, `torch.autograd.forward_ad`), which
    its own operations do, and no operator of ours. The compiler cannot say it of `torch.func.grad` and `vmap`, where it
    stops with an error at our operators."""
    return forward_ad._current_level >= 0 or (not is_compiling() and _transformed() is not None)


def plain(x: Tensor) -> bool:
    """Whether a tensor has memory that a kernel can read: a fake one says that it is on the CPU, and is not."""
    return type(x) in _PLAIN

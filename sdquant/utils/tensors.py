"""What torch does slowly, or otherwise on another device or in another thread: check, divide and set tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


_CHUNK = 1 << 22  # values of a byte that are widened together: torch finds no extremes in float8


def is_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or infinite. `isfinite` takes twenty times as long, and as much memory."""
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:
        return all(_finite(chunk.float()) for chunk in torch.split(tensor.reshape(-1), _CHUNK))
    return _finite(tensor)


def _finite(tensor: Tensor) -> bool:
    import torch

    low, high = torch.aminmax(tensor)  # a NaN anywhere makes both one
    return bool(low > -torch.inf) and bool(high < torch.inf)


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Make this the module's parameter of that name.

    Not by an assignment or `register_parameter`: while diffusers loads a model in some thread, accelerate exchanges
    that method for the modules of all threads, and what it gets goes to the meta device.
    """
    module._parameters[name] = parameter


def divided(x: Tensor, by: float) -> Tensor:
    """Return x / by in x's shape, float dtype and device, bit-equal to the CPU's result.

    On CUDA, ROCm and XPU torch multiplies by the reciprocal of a Python number, which rounds twice: scales would differ
    from those of a CPU, and from those of the Triton kernels, in the last bit. So this divides by a tensor.
    """
    wide = x.float() if x.element_size() == 2 else x  # so that `by` is not rounded
    return wide.div(wide.new_full((), by)).to(x.dtype)

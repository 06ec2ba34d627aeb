"""The one place that imports bitsandbytes, and facts about it that its codecs need."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ..utils.process_state import errors_only

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# What bitsandbytes quantizes; it raises for anything else.

# On the CPU weights are decoded in pieces of this many values, so that a piece stays in the cache and `decode_into`
# needs no second full-size tensor. A multiple of every block size. On a GPU one launch is better than many.
TILE = 2**20


def tile(device: torch.device, size: int) -> int:
    """Return how many of `size` values to decode at once on `device`."""
    return TILE if device.type == "cpu" else max(size, 1)


def _not_the_cast_to_half(record: logging.LogRecord) -> bool:
    # Logged at every forward of every layer with bf16 or fp32 activations. It says what LLM.int8() is.
    return not record.getMessage().startswith("MatMul8bitLt: inputs will be cast from")


@lru_cache(maxsize=1)
def library() -> Any:
    """Import `bitsandbytes` without its messages about missing optional extras, and return the module."""
    # On CPUs with AVX512-BF16 the import looks for the package `kernels`, which sdquant has no use for, and warns.
    with errors_only("bitsandbytes.backends.cpu.ops"):
        import bitsandbytes
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_not_the_cast_to_half)
    return bitsandbytes


@cache
def installed() -> bool:
    """Return whether bitsandbytes is installed, without importing it."""
    return importlib.util.find_spec("bitsandbytes") is not None


@cache
def has_kernel(operator: str, device_type: str) -> bool:
    """Return whether bitsandbytes has a kernel of its own for one of its operators on such devices.

    It has all of them for "cuda" and those that it needs itself elsewhere: none to dequantize 8-bit blocks into an
    existing tensor on "mps", and none on devices that it does not know.
    """
    library()  # registers them
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"bitsandbytes::{operator}", key)


def on_library(operator: str, device: torch.device) -> bool:
    """Return whether to use bitsandbytes' kernel for weights on `device`; on CPUs sdquant's own are faster."""
    return device.type != "cpu" and installed() and has_kernel(operator, device.type)


def apply_to_layer(layer: Any, fn: Callable[[Tensor], Tensor], of_torch: Callable[[], object]) -> None:
    """Do what `Module._apply(fn)` does, which is `of_torch`, also for moves to the meta device.

    For these torch makes a new parameter of a weight's `detach()`, which for bitsandbytes' classes is a plain tensor,
    and raises RuntimeError.
    """
    weight = layer.weight
    if weight.is_meta or not fn(torch.empty(0, dtype=weight.dtype, device=weight.device)).is_meta:
        of_torch()
        return
    layer._parameters["weight"] = None
    try:
        of_torch()
    finally:
        layer._parameters["weight"] = weight.to("meta")

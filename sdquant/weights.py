"""The weights of a loaded model: which are quantized, which are not, and what they take in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .backends.base import Packed


def quantized(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """The quantized weights of a module, by weight name."""
    from .layers import packed_of

    for path, module in model.named_modules():
        packed = packed_of(module) if path else None
        if packed is not None:
            yield f"{path}.weight", packed


def plain(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module's state that belong to no quantized weight, by name; tied ones once, under one name."""
    from .layers import packed_of

    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        hidden = bool(path) and packed_of(module) is not None
        for leaf, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen or (hidden and leaf != "bias"):
                continue
            seen.add(id(parameter))
            tensors[f"{path}.{leaf}".lstrip(".")] = parameter.data
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set and not hidden:
                tensors[f"{path}.{leaf}".lstrip(".")] = buffer
    return tensors


def weight_bytes(model: Any) -> int:
    """Bytes of the weights of a pipeline or module: packed parts and plain tensors of the state.

    Counted as `Detected.bytes` and `Plan.bytes` are, from the loaded tensors themselves. Code tables, which are
    constants of a scheme, and buffers that no file holds are left out; `sdquant.offload.weight_bytes` counts those too.
    """
    from .components import is_pipeline, weight_parts

    parts = list(weight_parts(model).values()) if is_pipeline(model) else [model]
    packed = sum(row.nbytes for part in parts for _, row in quantized(part))
    return packed + sum(t.numel() * t.element_size() for part in parts for t in plain(part).values())

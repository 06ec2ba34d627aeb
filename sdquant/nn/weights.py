"""The weights of a loaded model: the quantized and the unquantized ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core import Packed


def quantized(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """Yield the quantized weights of a module, by weight name."""
    from .layer_factory import packed_of

    for path, module in model.named_modules():
        packed = packed_of(module) if path else None
        if packed is not None:
            yield f"{path}.weight", packed


def plain(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's state that belong to no quantized weight, by name; tied ones once."""
    from .layer_factory import packed_of

    tensors: dict[str, Tensor] = {}
    ids: set[int] = set()
    for path, module in model.named_modules():
        hidden = bool(path) and packed_of(module) is not None
        for leaf, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ids or (hidden and leaf != "bias"):
                continue
            ids.add(id(parameter))
            tensors[f"{path}.{leaf}".lstrip(".")] = parameter.data
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set and not hidden:
                tensors[f"{path}.{leaf}".lstrip(".")] = buffer
    return tensors

"""Convert quantized weights from the byte order that kernels use (`kernels.prepack`) to that of files."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ..nn import quantized
from .portable import Later

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core import Packed


def as_filed(packed: Packed) -> Packed:
    """Return the weight in file order, unchanged if it is in that order. The conversion runs on the CPU, so that saving
    takes no GPU memory."""
    import torch

    from ..kernels import prepack

    if not prepack.is_apart(packed):
        return packed
    here = packed if packed.device.type == "meta" else packed.to(torch.device("cpu"))
    return packed.spec.scheme.codec.for_files(here)


def file_shape(packed: Packed) -> Packed:
    """Return a weight that is not in file order in that order on the meta device; any other unchanged."""
    import torch

    from ..kernels import prepack

    return as_filed(packed.to(torch.device("meta"))) if prepack.is_apart(packed) else packed


def reordered(
    model: nn.Module, without: Container[str] = (), keys: Mapping[str, str] | None = None
) -> dict[str, Later]:
    """Return the tensors of weights that are not in file order, by key, each converted only when it is written.

    Args:
        without: weights to leave out. keys: names in the file of weights that the model names differently.
    """
    later: dict[str, Later] = {}
    for name, packed in quantized(model):
        shape = file_shape(packed)
        if name in without or shape is packed:
            continue
        there = (keys or {}).get(name, name)
        forms = packed.spec.scheme.codec.write(there, shape)
        later |= {key: Later(form, partial(_written, there, packed, key)) for key, form in forms.items()}
    return later


def _written(name: str, packed: Packed, key: str) -> Tensor:
    return packed.spec.scheme.codec.write(name, as_filed(packed))[key]

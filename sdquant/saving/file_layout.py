"""Quantized weights in the order of their files, whatever order of bytes kernels have them in (`kernels.layout`)."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ..core import registry
from ..nn.weights import quantized
from .portable import Later

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core.backend import Packed


def as_filed(packed: Packed) -> Packed:
    """The weight as files have it; itself where that is its order. Another order is undone on the CPU, so that no card
    needs memory for a model to be saved."""
    import torch

    from ..kernels.prepack import is_apart

    if not is_apart(packed):
        return packed
    here = packed if packed.device.type == "meta" else packed.to(torch.device("cpu"))
    return registry.of_scheme(packed.spec.scheme).for_files(here)


def shape_of(packed: Packed) -> Packed:
    """A weight that is not in the order of its file, as files have it, but on the meta device; any other as it is."""
    import torch

    from ..kernels.prepack import is_apart

    return as_filed(packed.to(torch.device("meta"))) if is_apart(packed) else packed


def reordered(
    model: nn.Module, without: Container[str] = (), keys: Mapping[str, str] | None = None
) -> dict[str, Later]:
    """The tensors of weights that are not in the order of their files, by their keys, each made when it is written; of
    weights not those named.

    Args:
        keys: what the file calls weights that the model calls otherwise.
    """
    made: dict[str, Later] = {}
    for name, packed in quantized(model):
        shape = shape_of(packed)
        if name in without or shape is packed:
            continue
        there = (keys or {}).get(name, name)
        forms = registry.of_scheme(packed.spec.scheme).write(there, shape)
        made |= {key: Later(form, partial(_written, there, packed, key)) for key, form in forms.items()}
    return made


def _written(name: str, packed: Packed, key: str) -> Tensor:
    return registry.of_scheme(packed.spec.scheme).write(name, as_filed(packed))[key]

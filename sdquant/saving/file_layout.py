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


def reordered(
    model: nn.Module, without: Container[str] = (), keys: Mapping[str, str] | None = None
) -> dict[str, Later]:
    """Return the tensors of weights that are not in file order, by key, each converted only when it is written.

    Args:
        without: weights to leave out. keys: names in the file of weights that the model names differently.
    """
    from ..kernels import prepack

    later: dict[str, Later] = {}
    for name, packed in quantized(model):
        shape = prepack.file_shape(packed)
        if name in without or shape is packed:
            continue
        there = (keys or {}).get(name, name)
        forms = packed.spec.scheme.codec.write(there, shape)
        later |= {key: Later(form, partial(_written, there, packed, key)) for key, form in forms.items()}
    return later


def _written(name: str, packed: Packed, key: str) -> Tensor:
    from ..kernels import prepack

    return packed.spec.scheme.codec.write(name, prepack.as_filed(packed))[key]

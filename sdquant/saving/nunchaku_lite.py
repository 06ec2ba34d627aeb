"""Layers in the tensors of diffusers' `nunchaku_lite`, which are others than those of sdquant's own folders."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from ..nn import quantized
from .file_layout import as_filed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core import Packed


def forms(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors of these weights' layers, on the meta device or without their values, by key."""
    import torch

    from ..backends import nunchaku_lite

    meta = torch.device("meta")
    return {
        key: form
        for path, packed, bias in _layers(model, names)
        for key, form in nunchaku_lite(path, packed.to(meta), None if bias is None else bias.to(meta)).items()
    }


def created(model: nn.Module, names: Collection[str]) -> Iterator[Mapping[str, Tensor]]:
    """Yield the tensors of each layer."""
    from ..backends import nunchaku_lite  # which imports torch

    for path, packed, bias in _layers(model, names):
        yield nunchaku_lite(path, as_filed(packed), bias)


def _layers(model: nn.Module, names: Collection[str]) -> Iterator[tuple[str, Packed, Tensor | None]]:
    for name, packed in quantized(model):
        if name in names:
            path = name.rpartition(".")[0]
            bias = getattr(model.get_submodule(path), "bias", None)
            yield path, packed, None if bias is None else bias.detach()

"""Correct the biases of a model's layers, once all its weights are quantized and its biases loaded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from . import components
from .quantize_weight import bias_change

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core import Packed, QuantSpec

log = logging.getLogger(__name__)


class BiasCorrection:
    """Changes of the biases of one model's layers, for specs with the option `bias`; none for others."""

    def __init__(self) -> None:
        self._changes: dict[str, Tensor] = {}  # by path of the layer

    def add(self, name: str, key: str, weight: Tensor, packed: Packed, spec: QuantSpec) -> None:
        """Note what a weight's errors make of the mean input.

        Args:
            name: of the weight in the model. key: its name for `spec`. packed: what became of `weight`.
        """
        change = bias_change(key, weight, packed, spec)
        if change is not None:
            self._changes[name.rpartition(".")[0]] = change

    def apply(self, model: nn.Module) -> None:
        """Change the biases. They are new tensors: those of a file may be mapped, and not be written to."""
        none = 0
        for path, change in self._changes.items():
            bias = model.get_submodule(path)._parameters.get("bias")
            if bias is None:
                none += 1
                continue
            corrected = (bias.detach().float() + change.to(bias.device)).to(bias.dtype)
            components.set_tensor(model, (f"{path}.bias",), corrected)
        if none:
            level = logging.WARNING if none == len(self._changes) else logging.INFO
            log.log(
                level, "%s: %d of %d layers have no bias to correct", type(model).__name__, none, len(self._changes)
            )
        self._changes.clear()

"""What the LoRAs of SD.Next and AUTOMATIC1111 do to packed weights, by the hosts' own objects.

Both make an object of each layer of a LoRA's file, for the types of layers that they know, by exact type. The object
computes what is to be added to the layer's weight: `calc_updown(weight)` gives that, and what is added to the bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Change:
    """What one LoRA adds to a weight. `module`: the host's object for the layer, with the strength."""

    module: Any

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the changed weight."""
        from torch.nn import functional as F

        update, _ = self.module.calc_updown(weight)
        if update is None:
            return weight
        missing = weight.shape[1] - update.shape[1] if weight.dim() == update.dim() == 4 else 0
        if missing > 0:  # an inpainting model's first layer, with channels that others do not have
            update = F.pad(update, (0, 0, 0, 0, 0, missing))
        changed: Tensor = weight + update.to(weight.device, weight.dtype)
        return changed


@dataclass(frozen=True)
class BiasChange:
    """What one LoRA adds to a bias, which the hosts compute together with the weight's. `layer`: the quantized one."""

    module: Any
    layer: Any

    def __call__(self, bias: Tensor) -> Tensor:
        """Return the changed bias."""
        _, update = self.module.calc_updown(self.layer.dequantize(bias.dtype).to(bias.device))
        return bias if update is None else bias + update.to(bias.device, bias.dtype)


def with_float_layer(weights: Any) -> Any:
    """Return the hosts' `NetworkWeights`, which names a layer, with a float layer for a quantized one.

    It has no memory: the hosts need its type and sizes.
    """
    from ..nn import empty_float_layer

    if not is_quantized(weights.sd_module):
        return weights
    return weights._replace(sd_module=empty_float_layer(weights.sd_module))


def is_quantized(layer: Any) -> bool:
    """Return whether the layer's weight is packed by sdquant."""
    from ..nn import QuantizedLayer

    return isinstance(layer, QuantizedLayer)

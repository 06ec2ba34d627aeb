"""What A1111's extensions read of a quantized UNet: a state dict with float weights, as that of any other UNet.

* sd-webui-controlnet (1.1.455) adds the ControlNets that are saved as differences to `unet.state_dict()`. A weight that
  is not there it would leave a difference, without a word.
* supermerger (0b1c491) saves `shared.sd_model.state_dict()` as a checkpoint, in which no program finds packed weights.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .network_changes import is_quantized

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)
_HOOKED = "_sdquant_shows_floats"


def show_floats(unet: nn.Module) -> None:
    """Have the state dict of a UNet, and of the model around it, show quantized layers as float ones."""
    if not hasattr(unet, _HOOKED):  # which A1111 keeps for the next checkpoint
        unet.register_state_dict_post_hook(_put_floats)  # type: ignore[no-untyped-call]
        setattr(unet, _HOOKED, True)


def _put_floats(unet: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put a weight in the place of the parts of each quantized layer.

    Args:
        prefix: "" for the UNet's own state dict, of which extensions read some weights or only names: those are
            decoded when they are read. All of them are decoded, into RAM, for the whole model's, which is saved.
    """
    layers: list[tuple[str, Any]] = [(path, one) for path, one in unet.named_modules() if is_quantized(one)]
    for path, layer in layers:
        start = f"{prefix}{path}."
        for leaf in [key.removeprefix(start) for key in state if key.startswith(start)]:
            if leaf != "bias":
                del state[start + leaf]
        state[f"{start}weight"] = layer.dequantize(layer.weight.dtype).cpu() if prefix else layer.weight
    if layers and prefix:
        log.warning(
            "The model's weights were asked for, as for saving it: they are the values of its quantized ones (%s), "
            "not the original ones. To save the original ones, load the model with the scheme 'as found'.",
            layers[0][1].spec.scheme,
        )

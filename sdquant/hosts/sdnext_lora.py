"""SD.Next's LoRAs on quantized layers.

SD.Next makes an object of each layer of a LoRA's file, for the types of layers that it knows, by exact type. Then it
adds what the objects compute from a layer's weight to this weight, and subtracts it again. A packed weight is not
written to: its layer gets the objects as functions, which change the dequantized weight each time that it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import display
from .network_changes import BiasChange, Change, is_quantized, with_float_layer

if TYPE_CHECKING:
    from torch import Tensor

    from .monkeypatch import Patches

# What SD.Next finds as the backup of a weight: something to restore, which is no copy of it.
_KEPT = "packed"


def install(patches: Patches) -> None:
    """Hook into SD.Next's LoRAs; versions before 2025 have them elsewhere, and drop them."""
    if not display.has("modules.lora"):
        return
    networks, overrides = display.module("modules.lora.networks"), display.module("modules.lora.lora_overrides")
    patches.wrap(display.module("modules.lora.network"), "NetworkWeights", _weights)
    patches.wrap(networks, "network_backup_weights", _backup)
    patches.wrap(networks, "network_calc_weights", _calculate)
    patches.wrap(networks, "network_apply_direct", _apply)
    patches.wrap(networks, "network_apply_weights", _apply)
    patches.wrap(overrides, "disable_fuse", _no_fuse)


def _weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    return with_float_layer(original(*args, **kwargs))


def _backup(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_quantized(layer):
        return original(layer, *args, **kwargs)
    layer.network_weights_backup = _KEPT
    return 0


def _calculate(original: Any, layer: Any, name: str, use_previous: bool = False, **more: Any) -> Any:
    """Have SD.Next compute, and report what cannot be, from the dequantized weight; keep what can."""
    if not is_quantized(layer):
        return original(layer, name, use_previous, **more)
    if use_previous:  # what will be taken off is not computed
        return None, None
    common = display.module("modules.lora.lora_common")
    everything, update, bias = common.loaded_networks, None, None
    layer.sdquant_networks = []
    with_it = [network for network in everything if network.modules.get(name) is not None]
    if not with_it:  # SD.Next asks for every layer of the model
        return None, None
    floats = _Floats(layer.dequantize())
    try:
        for network in with_it:
            common.loaded_networks = [network]
            weight_change, bias_change = original(floats, name, **more)
            if weight_change is not None or bias_change is not None:
                layer.sdquant_networks.append((network.modules[name], bias_change is not None))
                update = update if weight_change is None else weight_change
                bias = bias if bias_change is None else bias_change
    finally:
        common.loaded_networks = everything
    return update, bias


@dataclass(frozen=True)
class _Floats:
    weight: Tensor


def _apply(original: Any, layer: Any, update: Any, bias: Any, *args: Any, **kwargs: Any) -> None:
    """Attach the LoRAs that were computed last; none where SD.Next has nothing to add, which takes them off."""
    if not is_quantized(layer):
        original(layer, update, bias, *args, **kwargs)
        return
    modules = layer.__dict__.pop("sdquant_networks", []) if update is not None or bias is not None else []
    layer.weight_function = tuple(Change(module) for module, _ in modules)
    layer.bias_function = tuple(BiasChange(module, layer) for module, has_bias in modules if has_bias)
    return None


def _no_fuse(original: Any) -> bool:
    """Say that no LoRA is to be fused into a model with packed weights."""
    pipe = display.module("modules.shared").sd_model
    parts = (getattr(pipe, name, None) for name in ("unet", "transformer", "transformer_2"))
    return bool(original()) or any(
        is_quantized(layer) for part in parts if part is not None for layer in part.modules()
    )

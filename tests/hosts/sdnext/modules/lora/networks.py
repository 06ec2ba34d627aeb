"""SD.Next 058a7f0cf (2026-07-23), modules/lora/networks.py: the wanted LoRAs on all layers, and off again."""

from modules import sd_models, shared
from modules.lora import lora_common as l
from modules.lora.lora_apply import (
    network_apply_direct,
    network_apply_weights,
    network_backup_weights,
    network_calc_weights,
)


def _layers(include):
    for name in include or ("text_encoder", "unet"):
        for module in getattr(sd_models.model_data.sd_model, name).modules():
            yield module, getattr(module, "network_layer_name", None)


def network_activate(include=None, exclude=None):
    wanted = tuple((x.name, x.te_multiplier, *x.unet_multiplier) for x in l.loaded_networks)
    for module, name in _layers(include):
        current = getattr(module, "network_current_names", ())
        if getattr(module, "weight", None) is None or name is None or current == wanted:
            continue
        network_backup_weights(module, name, wanted)
        updown = ex_bias = None
        if wanted:
            updown, ex_bias = network_calc_weights(module, name, elimit=lambda: None)
        else:
            kept = getattr(module, "network_weights_backup", None)
            if kept is None or isinstance(kept, bool):
                continue
        if shared.opts.lora_fuse_native:
            network_apply_direct(module, updown, ex_bias, device="cpu")
        else:
            network_apply_weights(module, updown, ex_bias, device="cpu")
        module.network_current_names = wanted


def network_deactivate(include=None, exclude=None):
    if not shared.opts.lora_fuse_native:
        return
    for module, name in _layers(include):
        if name is None or getattr(module, "weight", None) is None:
            continue
        updown, ex_bias = network_calc_weights(module, name, use_previous=True, elimit=lambda: None)
        network_apply_direct(module, updown, ex_bias, device="cpu", deactivate=True)
        module.network_current_names = ()


def change_to(nets):
    """What extra_networks_lora.ExtraNetworkLora.activate does where the prompt's LoRAs are others than before."""
    l.loaded_networks = list(nets)
    if l.previously_loaded_networks:
        network_deactivate()
    network_activate()
    l.previously_loaded_networks = l.loaded_networks.copy()

"""SD.Next 058a7f0cf (2026-07-23), modules/lora/lora_apply.py: what it adds to a weight, with a copy of the weight
kept, or later subtracted."""

import torch
from modules import shared
from modules.lora import lora_common as l

KEPT = {"weight": "network_weights_backup", "bias": "network_bias_backup"}


def network_backup_weights(self, network_layer_name, wanted_names):
    if not any(net.modules.get(network_layer_name) for net in l.loaded_networks) or not wanted_names:
        return 0
    for name, kept in KEPT.items():
        value = getattr(self, name, None)
        if value is not None and getattr(self, kept, None) is None:
            setattr(self, kept, True if shared.opts.lora_fuse_native else value.clone())
    return 0


def network_calc_weights(self, network_layer_name, use_previous=False, *, elimit=None):
    batch_updown = batch_ex_bias = None
    for net in l.previously_loaded_networks if use_previous else l.loaded_networks:
        module = net.modules.get(network_layer_name)
        if module is None:
            continue
        try:
            updown, ex_bias = module.calc_updown(self.weight.to("cpu"))
            batch_updown = updown if batch_updown is None else batch_updown + updown
            if ex_bias is not None:
                batch_ex_bias = ex_bias if batch_ex_bias is None else batch_ex_bias + ex_bias
        except RuntimeError:
            l.extra_network_lora.errors[net.name] = l.extra_network_lora.errors.get(net.name, 0) + 1
    return batch_updown, batch_ex_bias


def network_apply_direct(self, updown, ex_bias, deactivate=False, device=None):
    sign = -1 if deactivate else 1
    for name, value in (("weight", updown), ("bias", ex_bias)):
        if value is not None:
            setattr(self, name, torch.nn.Parameter(getattr(self, name) + sign * value, requires_grad=False))


def network_apply_weights(self, updown, ex_bias, device, deactivate=False):
    for name, value in (("weight", updown), ("bias", ex_bias)):
        kept = getattr(self, KEPT[name], None)
        if kept is not None:
            whole = kept if value is None else kept + value
            setattr(self, name, torch.nn.Parameter(whole.clone(), requires_grad=False))

"""A1111 1.10.1 (82a973c0), extensions-builtin/Lora/networks.py: LoRAs are in the weights of a layer when it runs."""

import re
import types

import network
import torch
from modules import script_callbacks, sd_models

loaded_networks = []
extra_network_lora = types.SimpleNamespace(errors={})
originals = {}
re_x_proj = re.compile(r"(.*)_([qkv]_proj)$")


def assign_network_names_to_compvis_modules(sd_model):
    sd_model.network_layer_mapping = {}
    for name, module in sd_model.model.named_modules():
        module.network_layer_name = name.replace(".", "_")
        sd_model.network_layer_mapping[module.network_layer_name] = module


script_callbacks.on_model_loaded(assign_network_names_to_compvis_modules)


def load_network(name, tensors):
    net = network.Network(name)
    mapping, found = sd_models.model_data.sd_model.network_layer_mapping, {}
    for key_network, weight in tensors.items():
        lora_key, _, part = key_network.partition(".")
        key = lora_key.replace("lora_unet", "diffusion_model")
        sd_module = mapping.get(key) or mapping[re_x_proj.match(key).group(1)]
        if key not in found:
            found[key] = network.NetworkWeights(network_key=key_network, sd_key=key, w={}, sd_module=sd_module)
        found[key].w[part] = weight
    net.modules = {key: network.NetworkModule(net, weights) for key, weights in found.items()}
    return net


def network_restore_weights_from_backup(self):
    if getattr(self, "network_weights_backup", None) is not None:
        self.weight.copy_(self.network_weights_backup)
    if getattr(self, "network_bias_backup", None) is not None:
        self.bias.copy_(self.network_bias_backup)


@torch.no_grad()
def network_apply_weights(self):
    name = getattr(self, "network_layer_name", None)
    if name is None:
        return
    wanted_names = tuple((x.name, x.te_multiplier, x.unet_multiplier, x.dyn_dim) for x in loaded_networks)
    if getattr(self, "network_weights_backup", None) is None and wanted_names != ():
        self.network_weights_backup = self.weight.to("cpu", copy=True)
        self.network_bias_backup = None if self.bias is None else self.bias.to("cpu", copy=True)
    if getattr(self, "network_current_names", ()) == wanted_names:
        return
    network_restore_weights_from_backup(self)
    for net in loaded_networks:
        module = net.modules.get(name)
        if module is None:
            continue
        try:
            updown, ex_bias = module.calc_updown(self.weight)
            self.weight.copy_(self.weight.to(updown.dtype) + updown)
            if ex_bias is not None:
                self.bias.copy_(self.bias + ex_bias)
        except RuntimeError:
            extra_network_lora.errors[net.name] = extra_network_lora.errors.get(net.name, 0) + 1
    self.network_current_names = wanted_names


def network_Linear_forward(self, input):
    network_apply_weights(self)
    return originals["Linear"](self, input)


def network_Conv2d_forward(self, input):
    network_apply_weights(self)
    return originals["Conv2d"](self, input)

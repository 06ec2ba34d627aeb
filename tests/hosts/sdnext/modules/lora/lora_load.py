"""SD.Next 058a7f0cf (2026-07-23), modules/lora/lora_load.py and lora_convert.py: names of layers, and objects."""

from modules import sd_models
from modules.lora import network


def assign_network_names_to_compvis_modules(sd_model):
    mapping = {}
    for part, prefix in (("unet", "lora_unet_"), ("text_encoder", "lora_te_")):
        for name, module in getattr(sd_model, part).named_modules():
            module.network_layer_name = prefix + name.replace(".", "_")
            mapping[module.network_layer_name] = module
    return mapping


def load(name, tensors):
    mapping = assign_network_names_to_compvis_modules(sd_models.model_data.sd_model)
    net = network.Network(name)
    for key, w in tensors.items():
        weights = network.NetworkWeights(network_key=key, sd_key=key, w=w, sd_module=mapping[key])
        net.modules[key] = network.NetworkModuleLora(net, weights)
    return net

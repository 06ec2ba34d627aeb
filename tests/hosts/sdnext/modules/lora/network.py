"""SD.Next 058a7f0cf (2026-07-23), modules/lora/network*.py: an object for each layer of a LoRA, by the layer's type
or its class's name; LoRAs with their bias and with DoRA's magnitudes stand for all forms."""

from collections import namedtuple

import torch

NetworkWeights = namedtuple("NetworkWeights", ["network_key", "sd_key", "w", "sd_module"])


class Network:
    def __init__(self, name):
        self.name, self.te_multiplier, self.unet_multiplier = name, 1.0, [1.0] * 3
        self.dyn_dim, self.modules = None, {}


class NetworkModuleLora:
    def __init__(self, net, weights):
        self.network, self.sd_key, self.sd_module = net, weights.sd_key, weights.sd_module
        self.shape = self.sd_module.weight.shape
        kind = type(self.sd_module)
        if kind not in (torch.nn.Linear, torch.nn.Conv2d) and kind.__name__ not in ("SDNQLinear", "QLinear"):
            raise AssertionError(f"Lora unsupported: layer={self.sd_key} type={kind.__name__}")
        self.up, self.down = weights.w["lora_up.weight"], weights.w["lora_down.weight"]
        self.dora_scale, self.ex_bias = weights.w.get("dora_scale"), weights.w.get("diff_b")

    def multiplier(self):
        return self.network.te_multiplier if self.sd_key.startswith("lora_te") else self.network.unet_multiplier[0]

    def calc_updown(self, target):
        updown = (self.up.flatten(1) @ self.down.flatten(1)).to(target.device, target.dtype).reshape(target.shape)
        if self.dora_scale is not None:
            whole = target + updown
            sizes = whole.flatten(1).norm(dim=1).reshape(-1, *[1] * (target.dim() - 1))
            updown = whole * self.dora_scale.to(whole) / sizes - target
        ex_bias = None if self.ex_bias is None else self.ex_bias.to(target) * self.multiplier()
        return updown * self.multiplier(), ex_bias

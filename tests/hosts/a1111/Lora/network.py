"""A1111 1.10.1 (82a973c0), extensions-builtin/Lora/network.py and network_lora.py: a LoRA's object for one layer."""

from collections import namedtuple

import torch

NetworkWeights = namedtuple("NetworkWeights", ["network_key", "sd_key", "w", "sd_module"])


class Network:
    def __init__(self, name):
        self.name = name
        self.te_multiplier = self.unet_multiplier = 1.0
        self.dyn_dim = None
        self.modules = {}


class NetworkModule:
    def __init__(self, net, weights):
        self.network, self.sd_key, self.sd_module = net, weights.sd_key, weights.sd_module
        if type(self.sd_module) not in (torch.nn.Linear, torch.nn.Conv2d):
            name = type(self.sd_module).__name__
            raise AssertionError(f"Lora layer {weights.network_key} matched a layer with unsupported type: {name}")
        self.shape = self.sd_module.weight.shape
        self.up, self.down = weights.w["lora_up.weight"], weights.w["lora_down.weight"]
        self.dora_scale = weights.w.get("dora_scale")
        self.ex_bias = weights.w.get("diff_b")

    def multiplier(self):
        return self.network.te_multiplier if "transformer" in self.sd_key[:20] else self.network.unet_multiplier

    def calc_updown(self, target):
        updown = (self.up.to(target).flatten(1) @ self.down.to(target).flatten(1)).reshape(target.shape)
        if self.dora_scale is not None:
            whole = target + updown
            norm = whole.flatten(1).norm(dim=1).reshape(-1, *[1] * (whole.dim() - 1))
            updown = whole * (self.dora_scale.to(norm) / norm) - target
        ex_bias = None if self.ex_bias is None else self.ex_bias * self.multiplier()
        return updown * self.multiplier(), ex_bias

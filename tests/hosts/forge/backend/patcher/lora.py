"""Forge dfdcbab6, backend/patcher/lora.py: LoRAs are added to parameters, or are layers' `forge_online_loras`."""

import torch


@torch.inference_mode()
def merge_lora_to_weight(patches, weight, key="online_lora", computation_dtype=torch.float32):
    dtype = weight.dtype
    weight = weight.to(computation_dtype, copy=True)
    for strength, (kind, values), strength_model, offset, _function in patches:
        whole = weight
        if offset is not None:
            weight = weight.narrow(*offset)
        weight *= strength_model
        if kind == "diff":
            weight += strength * values[0].to(weight)
        else:
            up, down, alpha, _middle, _dora = values
            update = (up.to(weight).flatten(1) @ down.to(weight).flatten(1)).reshape(weight.shape)
            weight += strength * (1.0 if alpha is None else alpha / down.shape[0]) * update
        weight = whole
    return weight.to(dtype)


class LoraLoader:
    def __init__(self, model):
        self.model = model
        self.backup = {}
        self.online_backup = []
        self.loaded_hash = str([])

    @torch.inference_mode()
    def refresh(self, lora_patches, offload_device=torch.device("cpu"), force_refresh=False):  # noqa: B008
        hashes = str(list(lora_patches.keys()))
        if hashes == self.loaded_hash and not force_refresh:
            return
        for layer in set(self.online_backup):
            del layer.forge_online_loras
        self.online_backup = []
        for key, weight in self.backup.items():
            self._set(key, weight)
        self.backup = {}
        found = {}
        for (_, _, _, online), patches in lora_patches.items():
            for key, rows in patches.items():
                found[key, online] = found.get((key, online), []) + rows
        for (key, online), rows in found.items():
            path, _, leaf = key.rpartition(".")
            layer = self.model.get_submodule(path)
            weight = getattr(layer, leaf)
            if not isinstance(weight, torch.nn.Parameter):
                raise ValueError(f"Wrong LoRA Key: {key}")
            if online:
                layer.__dict__.setdefault("forge_online_loras", {})[leaf] = rows
                self.online_backup.append(layer)
                continue
            self.backup.setdefault(key, weight.to(device=offload_device))
            merged = merge_lora_to_weight(rows, weight, key, computation_dtype=torch.float32)
            self._set(key, torch.nn.Parameter(merged, requires_grad=False))
        self.loaded_hash = hashes

    def _set(self, key, weight):
        path, _, leaf = key.rpartition(".")
        setattr(self.model.get_submodule(path), leaf, weight)

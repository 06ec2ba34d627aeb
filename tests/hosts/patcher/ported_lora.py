"""What Forge Neo and reForge have of ComfyUI's LoRAs: names, forms, and what they add to a weight."""

import torch


def model_lora_keys_unet(model, key_map=None):
    return {
        f"lora_unet_{key.removeprefix('diffusion_model.').removesuffix('.weight').replace('.', '_')}": key
        for key in model.state_dict()
        if key.startswith("diffusion_model.") and key.endswith(".weight")
    }


def model_lora_keys_clip(model, key_map=None):
    return {
        f"lora_te_{key.removeprefix('clip_l.').removesuffix('.weight').replace('.', '_')}": key
        for key in model.state_dict()
        if key.endswith(".weight")
    }


class LoRAAdapter:
    """weights: up, down, alpha, mid, dora_scale, reshape."""

    name = "lora"

    def __init__(self, loaded_keys, weights):
        self.loaded_keys, self.weights = loaded_keys, weights

    def calculate_weight(
        self,
        weight,
        key,
        strength,
        strength_model,
        offset,
        function,
        intermediate_dtype=torch.float32,
        original_weight=None,
    ):
        up, down, alpha, _, dora_scale, _ = self.weights
        scale = 1.0 if alpha is None else alpha / down.shape[0]
        change = scale * (up.flatten(1) @ down.flatten(1)).reshape(weight.shape).to(weight.dtype)
        if dora_scale is None:
            weight += strength * change
        else:
            sizes = weight.flatten(1).norm(dim=1).reshape(-1, *[1] * (weight.dim() - 1))
            weight += strength * ((weight + change) * (dora_scale / sizes).to(weight.dtype) - weight)
        return weight


def load_lora(lora, to_load):
    patches, loaded = {}, set()
    for name, key in to_load.items():
        if f"{name}.lora_up.weight" in lora:
            up, down = lora[f"{name}.lora_up.weight"], lora[f"{name}.lora_down.weight"]
            patches[key] = LoRAAdapter(set(), (up, down, None, None, lora.get(f"{name}.dora_scale"), None))
            loaded |= {key for key in lora if key.startswith(f"{name}.")}
        if f"{name}.diff_b" in lora:
            patches[f"{key.removesuffix('.weight')}.bias"] = ("diff", (lora[f"{name}.diff_b"],))
    return patches, {key: value for key, value in lora.items() if key not in loaded}


def add(patches, weight, key, dtype):
    for strength, v, strength_model, offset, function in patches:
        if isinstance(v, tuple):
            weight += strength * v[1][0].to(weight.dtype)
        else:
            weight = v.calculate_weight(weight, key, strength, strength_model, offset, function, dtype)
    return weight

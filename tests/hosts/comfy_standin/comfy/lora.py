"""Patches, as in `comfy/lora.py`: (strength, value, strength_model, offset, function)."""

import torch

import comfy.model_management


def calculate_shape(patches, weight, key, original_weights=None):
    shape = weight.shape
    for _, value, _, offset, _ in patches:
        if offset is None and isinstance(value, tuple) and len(value) == 2 and value[0] == "diff":
            diff, *options = value[1]
            if options and options[0]["pad_weight"]:
                shape = diff.shape
    return shape


def calculate_weight(patches, weight, key, intermediate_dtype=torch.float32, original_weights=None):
    for strength, value, strength_model, offset, function in patches:
        whole = weight
        if offset is not None:
            weight = weight.narrow(*offset)
        if strength_model != 1.0:
            weight *= strength_model
        if isinstance(value, list):  # another model's weight: [(weight, convert), *patches]
            other, convert = value[0]
            other = comfy.model_management.cast_to_device(other, weight.device, intermediate_dtype, copy=True)
            value = (calculate_weight(value[1:], convert(other, inplace=True), key, intermediate_dtype),)
        if len(value) == 1:
            diff = value[0]
        elif value[0] == "diff":
            diff = value[1][0]
        elif value[0] == "model_as_lora":
            diff = value[1][0].to(intermediate_dtype) - comfy.model_management.cast_to_device(
                original_weights[key][0][0], weight.device, intermediate_dtype
            )
        else:  # what a LoRA's adapter does
            up, down, alpha = value[1]
            scale = alpha / down.shape[0]
            diff = scale * (up.to(intermediate_dtype) @ down.to(intermediate_dtype)).reshape(weight.shape)
        added = strength * comfy.model_management.cast_to_device(diff, weight.device, weight.dtype)
        weight += added if function is None else function(added)
        weight = whole
    return weight


def model_lora_keys_unet(model, key_map):
    for key in model.state_dict():
        if key.startswith("diffusion_model.") and key.endswith(".weight"):
            key_map[key[: -len(".weight")]] = key
    return key_map

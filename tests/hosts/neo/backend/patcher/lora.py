"""Forge Neo 2.26, 5692d2d (2026-08-17), backend/patcher/lora.py and its packages/comfy: names, forms, and merging."""

import torch
from ported_lora import add, load_lora, model_lora_keys_clip, model_lora_keys_unet

__all__ = ["load_lora", "model_lora_keys_clip", "model_lora_keys_unet"]


def merge_lora_to_weight(patches, weight, key, computation_dtype=torch.float32):
    return add(patches, weight, key, computation_dtype)

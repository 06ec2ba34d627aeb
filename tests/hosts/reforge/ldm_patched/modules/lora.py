"""reForge 3b56b268 (2026-03-11), ldm_patched/modules/lora.py."""

import ported_lora
import torch
from ported_lora import model_lora_keys_clip, model_lora_keys_unet

__all__ = ["model_lora_keys_clip", "model_lora_keys_unet"]


def load_lora(lora, to_load, log_missing=True):
    return ported_lora.load_lora(lora, to_load)[0]


def calculate_weight(patches, weight, key, intermediate_dtype=torch.float32, original_weights=None):
    return ported_lora.add(patches, weight, key, intermediate_dtype)

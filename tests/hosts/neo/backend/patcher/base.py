"""Forge Neo 2.26, 5692d2d (2026-08-17), backend/patcher/base.py."""

import ported_patcher
from backend.memory_management import module_size
from backend.patcher.lora import merge_lora_to_weight

LowVramPatch, ModelPatcher = ported_patcher.classes(
    "parameters_manual_cast", "forge_patched_weights", module_size, merge_lora_to_weight
)

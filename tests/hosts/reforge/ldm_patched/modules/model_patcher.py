"""reForge 3b56b268 (2026-03-11), ldm_patched/modules/model_patcher.py."""

import ported_patcher
from ldm_patched.modules.lora import calculate_weight
from ldm_patched.modules.model_management import module_size

LowVramPatch, ModelPatcher = ported_patcher.classes(
    "ldm_patched_cast_weights", "ldm_patched_patched_weights", module_size, calculate_weight
)

"""Forge dfdcbab6, backend/patcher/base.py: a model's handle for the mover, with the LoRAs that it is to have."""

from backend import memory_management
from backend.patcher.lora import LoraLoader


class ModelPatcher:
    def __init__(self, model, size=0):
        self.model, self.size = model, size
        self.lora_patches = {}
        self.model_size()
        if not hasattr(model, "lora_loader"):
            model.lora_loader = LoraLoader(model)
        self.lora_loader = model.lora_loader

    def model_size(self):
        if self.size <= 0:
            self.size = memory_management.module_size(self.model)
        return self.size

    def clone(self):
        copy = ModelPatcher(self.model, self.size)
        copy.lora_patches = self.lora_patches.copy()
        return copy

    def add_patches(self, *, filename, patches, strength_patch=1.0, strength_model=1.0, online_mode=False):
        names, found, rows = {key for key, _ in self.model.named_parameters()}, set(), {}
        for one, patch in patches.items():
            key, offset, function = (one, None, None) if isinstance(one, str) else (*one, None)[:3]
            if key in names:
                found.add(one)
                rows.setdefault(key, []).append([strength_patch, patch, strength_model, offset, function])
        self.lora_patches[filename, strength_patch, strength_model, online_mode] = rows
        return found

    def has_online_lora(self):
        return any(online for _, _, _, online in self.lora_patches)

    def refresh_loras(self):
        self.lora_loader.refresh(lora_patches=self.lora_patches, offload_device="cpu")

"""SD.Next 058a7f0cf (2026-07-23), modules/lora/lora_overrides.py: whether diffusers' LoRAs are not to be fused."""


def disable_fuse():
    return False

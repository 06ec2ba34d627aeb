"""Find training keys that are set but have no effect in combination with the others. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .keys import key

if TYPE_CHECKING:
    from .config import RunConfig

_OF_LORA = ("lora_alpha", "lora_dropout", "lora_target_modules")
_OF_LAYERS = ("components", "skip", "runtime")


def unused_in_training(config: RunConfig) -> Mapping[str, str]:
    """Return those keys by name, each with the reason; none for other commands."""
    if config.command != "train":
        return {}
    reasons: dict[str, str] = {}
    if config.lora_rank:
        reasons["dtype"] = "it sets the dtype of a saved model, and LoRA weights are always float32"
    else:
        reasons |= dict.fromkeys(_OF_LORA, "lora_rank is 0, so no LoRA is trained")
        if not config.quantization and not config.rules:
            reasons |= dict.fromkeys(_OF_LAYERS, "nothing is quantized")
    if config.dataset_name:
        reasons["caption_column"] = "dataset_name has its own captions"
    if config.lr_scheduler == "constant":
        reasons["warmup_steps_fraction"] = "lr_scheduler: constant has no warmup; constant_with_warmup has one"
    return {name: reason for name, reason in reasons.items() if config[name] != key(name).default}

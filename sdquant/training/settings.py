"""Settings of a training, from a config, checked for values that contradict each other."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..rules import QtRule, QuantizationRule, qconfig

if TYPE_CHECKING:
    from ..planning import Request
    from .config import RunConfig

# Settings that may change when a training is resumed; of `model` how it is loaded, but not its rules and scheme.
FREE = (
    "output_dir", "run_name", "max_train_steps", "dtype", "checkpoint_every", "checkpoints_to_keep", "resume",
    "log_every", "sample_every", "sample_prompts", "sample_steps", "progress", "model", "device",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """One training. The fields are the config's keys, documented in `config.keys`, except for these:

    Attributes:
        model: how the pipeline is loaded, in float32.
        rules: for quantized training. Components other than the trained network are quantized by them beforehand.
        dtype: of the saved model; None for the network's dtype on disk.
        resolution, max_sequence_length: None for the model's own.

    Raises:
        SettingsError: values that contradict each other.
    """

    model: Request
    rules: tuple[QuantizationRule, ...]
    quant_stats: str | None
    dtype: str | None
    device: str | None
    output_dir: str
    run_name: str
    seed: int
    dataset_name: str
    train_data_dir: str
    caption_column: str
    resolution: int | None
    cond_dropout: float
    max_sequence_length: int | None
    max_train_steps: int
    per_device_batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    lr_scheduler: str
    warmup_steps_fraction: float
    adam_b1: float
    adam_b2: float
    adam_eps: float
    adam_weight_decay: float
    max_grad_norm: float
    mixed_precision: str
    ema: float
    guidance_min: float
    guidance_max: float
    distillation: bool
    lora_rank: int
    lora_alpha: float | None
    lora_dropout: float
    lora_target_modules: tuple[str, ...]
    checkpoint_every: int
    checkpoints_to_keep: int
    resume: str
    log_every: int
    sample_every: int
    sample_prompts: tuple[str, ...]
    sample_steps: int
    progress: bool

    def __post_init__(self) -> None:
        if bool(self.dataset_name) == bool(self.train_data_dir):
            what = "on both dataset_name and train_data_dir" if self.dataset_name else "without data"
            raise SettingsError(
                f"Cannot train {what}",
                "exactly one of dataset_name and train_data_dir must be set",
                "Set train_data_dir=FOLDER, or dataset_name=digits",
            )
        if self.model.quant is not None and not self.lora_rank:
            raise SettingsError(
                f"Cannot train with quantization={self.model.quant}",
                "weights quantized by a backend cannot be trained, only a LoRA on them can",
                "Set lora_rank, or use_qwix_quantization: true to train with quantization in the loop",
            )
        if self.rules and self.lora_rank:
            raise SettingsError(
                "Cannot combine lora_rank with rules for quantized training",
                "the network is frozen while a LoRA is trained",
                "Set use_qwix_quantization: false and quantization to a scheme, or leave lora_rank out",
            )
        for rule in self.rules:
            shards = rule.bwd_weight_grad_shards if isinstance(rule, QtRule) and rule.bwd_qtype is not None else None
            if shards and self.per_device_batch_size % shards:
                raise SettingsError(
                    f"Cannot split per_device_batch_size={self.per_device_batch_size} into {shards} gradient shards "
                    "(quantization_local_shard_count, or bwd_weight_grad_shards of a rule)",
                    "each shard is an equal part of the batch",
                    f"Use a batch of {shards}, or a number of shards that divides {self.per_device_batch_size}",
                )
        if self.guidance_min > self.guidance_max:
            raise SettingsError(
                f"Cannot use guidance_min={self.guidance_min:g} with guidance_max={self.guidance_max:g}",
                "the minimum is larger than the maximum", "Swap them",
            )  # fmt: skip

    @property
    def folder(self) -> Path:
        """Return the folder that this run writes to."""
        return Path(self.output_dir).expanduser() / self.run_name

    def fixed(self) -> dict[str, Any]:
        """Return the settings that a resumed training must share with the original one, as JSON values."""
        values = {row.name: getattr(self, row.name) for row in dataclasses.fields(self) if row.name not in FREE}
        values["rules"] = [qconfig.to_dict(rule) for rule in self.rules]
        values |= {"quant": self.model.quant, "components": self.model.components, "skip": self.model.skip}
        result: dict[str, Any] = json.loads(json.dumps(values, default=dict))
        return result


def settings_of(config: RunConfig, *, progress: bool = False) -> TrainingSettings:
    """Return the settings of the training that a config describes.

    Raises:
        SdquantError: values that contradict each other.
    """
    from .config.loading import shards_of
    from .config.quantization import quantization_of
    from .config.to_request import request_of, require_command

    require_command(config, "train")
    request = request_of(config, progress=progress)
    rules = quantization_of(config, shards_of(config)).rules or ()
    own = {row.name for row in dataclasses.fields(TrainingSettings)} - {"model", "rules", "dtype", "progress"}
    return TrainingSettings(
        model=replace(request, dtype="float32", device="cpu", rules=None, quant_stats=None),
        rules=rules,
        dtype=request.dtype,
        progress=progress,
        **{name: config[name] for name in own},
    )

"""A training as values: of a config, checked as far as its keys have to do with each other."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..rules.qconfig import QtRule, QuantizationRule, to_dict

if TYPE_CHECKING:
    from ..planning.request import Request
    from .config import Config

# What may be another one when a training is resumed. Of `model`, how it is loaded; its rules and scheme are fixed.
FREE = (
    "output_dir", "run_name", "max_train_steps", "dtype", "checkpoint_every", "checkpoints_to_keep", "resume",
    "log_every", "sample_every", "sample_prompts", "sample_steps", "progress", "model", "device",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training. Fields are the config's keys, where `config.keys` tells of them, but for these:

    Attributes:
        model: how the pipeline is loaded, in float32.
        rules: of quantized training. Components beside the network that is trained are quantized by them beforehand.
        dtype: of the model that is written; None for what the network has on disk.
        resolution, max_sequence_length: None for the model's own.

    Raises:
        SettingsError: values that do not go together.
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
        """Where everything of this run is written."""
        return Path(self.output_dir).expanduser() / self.run_name

    def fixed(self) -> dict[str, Any]:
        """The values that a resumed training must share with the one it goes on from, as JSON values."""
        values = {row.name: getattr(self, row.name) for row in dataclasses.fields(self) if row.name not in FREE}
        values["rules"] = [to_dict(rule) for rule in self.rules]
        values |= {"quant": self.model.quant, "components": self.model.components, "skip": self.model.skip}
        made: dict[str, Any] = json.loads(json.dumps(values, default=dict))
        return made


def settings_of(config: Config, *, progress: bool = False) -> Settings:
    """The training that a config asks for.

    Raises:
        SdquantError: values that do not go together.
    """
    from .config.loading import shards_of
    from .config.quantization import quantization_of
    from .config.to_request import request_of, require_command

    require_command(config, "train")
    asked = request_of(config, progress=progress)
    rules = quantization_of(config, shards_of(config)).rules or ()
    own = {row.name for row in dataclasses.fields(Settings)} - {"model", "rules", "dtype", "progress"}
    return Settings(
        model=replace(asked, dtype="float32", device="cpu", rules=None, quant_stats=None),
        rules=rules,
        dtype=asked.dtype,
        progress=progress,
        **{name: config[name] for name in own},
    )

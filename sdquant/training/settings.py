"""What can be asked of a training: every field once, with its default and help."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import SettingsError

# diffusers.optimization's schedules that need nothing but the number of steps.
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")
PRECISIONS = ("no", "bf16", "fp16")
DATASETS = ("", "digits")


def _row(default: Any, help: str, choices: tuple[str, ...] = (), *, free: bool = False) -> Any:
    """A field. `free`: it may be another one when a training is resumed."""
    return field(default=default, metadata={"help": help, "choices": choices, "free": free})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training, as values. Names are MaxDiffusion's where it has them.

    Raises:
        SettingsError: a value that a field cannot have.
    """

    pretrained_model_name_or_path: str = field(metadata={"help": "what to train: as load_model's path"})
    output_dir: str = _row("runs", "folder of all runs", free=True)
    run_name: str = _row("run", "folder of this run within output_dir", free=True)
    seed: int = _row(0, "of everything that is drawn at random")
    # Data.
    dataset_name: str = _row("", "built-in data: digits", DATASETS)
    train_data_dir: str = _row("", "folder of pictures with metadata.jsonl or name.txt beside name.png")
    caption_column: str = _row("text", "the caption's key in metadata.jsonl")
    resolution: int = _row(0, "pixels a side; 0 for the model's own")
    cond_dropout: float = _row(0.1, "share of captions replaced by the empty one, for classifier-free guidance")
    max_sequence_length: int = _row(0, "tokens of the long text encoder; 0 for the pipeline's default")
    # Steps.
    max_train_steps: int = _row(1000, "optimizer steps in all", free=True)
    per_device_batch_size: int = _row(8, "examples in one forward pass of one process")
    gradient_accumulation_steps: int = _row(1, "forward passes in one step")
    learning_rate: float = _row(1e-4, "the highest")
    lr_scheduler: str = _row("cosine", "how the rate goes down", SCHEDULES)
    warmup_steps_fraction: float = _row(0.05, "share of the steps in which the rate goes up")
    adam_b1: float = _row(0.9, "AdamW's first beta")
    adam_b2: float = _row(0.999, "AdamW's second beta")
    adam_eps: float = _row(1e-8, "AdamW's epsilon")
    adam_weight_decay: float = _row(1e-2, "AdamW's weight decay")
    max_grad_norm: float = _row(1.0, "gradients are scaled down to this norm; 0 for any")
    mixed_precision: str = _row("no", "autocast of the forward pass", PRECISIONS)
    ema: float = _row(0.0, "decay of the averaged weights that are saved; 0 for none")
    train_guidance: tuple[float, float] = _row((3.5, 3.5), "range of the guidance input, of networks that have one")
    distillation: bool = _row(False, "learn the answers of the model as it was, in the place of the data's")
    # Quantization.
    quantization: str = _row("", "scheme of the frozen base of a LoRA training")
    rules: tuple[Mapping[str, Any], ...] = _row((), "rules of quantized training (QtRule's fields), in order")
    # LoRA.
    lora_rank: int = _row(0, "train a LoRA of this rank on a frozen base; 0 for the weights themselves")
    lora_alpha: float = _row(0.0, "its alpha; 0 for the rank")
    lora_dropout: float = _row(0.0, "share of a LoRA's inputs dropped")
    lora_target_modules: tuple[str, ...] = _row(
        ("to_q", "to_k", "to_v", "to_out.0"), "layers it is put on: the ends of their paths"
    )
    # What is written.
    checkpoint_every: int = _row(250, "steps from checkpoint to checkpoint; 0 for only the last", free=True)
    checkpoints_to_keep: int = _row(2, "how many are kept", free=True)
    resume: str = _row("", 'go on from "latest", or from "step-250"; "" starts afresh', free=True)
    log_every: int = _row(1, "steps from line to line of log.jsonl", free=True)
    sample_every: int = _row(0, "steps from sheet to sheet of pictures; 0 for only the last", free=True)
    sample_prompts: tuple[str, ...] = _row((), "what is drawn on them", free=True)
    sample_steps: int = _row(20, "denoising steps of a picture", free=True)
    progress: bool = _row(True, "show a progress bar", free=True)

    def __post_init__(self) -> None:
        for row in fields(self):
            value, choices = getattr(self, row.name), row.metadata.get("choices")
            if isinstance(value, list):
                object.__setattr__(self, row.name, tuple(value))
            if choices and value not in choices:
                named = ", ".join(repr(choice) for choice in choices)
                raise _refused(row.name, value, f"it is one of {named}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise _refused(name, getattr(self, name), f"it is at least {least}")
        for name in ("cond_dropout", "warmup_steps_fraction", "ema", "lora_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise _refused(name, getattr(self, name), "it is a share from 0 to 1")
        if len(self.train_guidance) != 2:
            raise _refused("train_guidance", self.train_guidance, "it is two numbers: the lowest and the highest")
        if not self.run_name or Path(self.run_name).name != self.run_name:
            raise _refused("run_name", self.run_name, "it is the name of one folder")
        self._check_sense()

    def _check_sense(self) -> None:
        if bool(self.dataset_name) == bool(self.train_data_dir):
            given = "both dataset_name and train_data_dir" if self.dataset_name else "no data"
            raise SettingsError(
                f"A training on {given} was asked for", "it takes one of them", "Give train_data_dir=FOLDER, or "
                "dataset_name=digits",
            )  # fmt: skip
        if self.quantization and not self.lora_rank:
            raise _refused(
                "quantization", self.quantization, "quantized weights cannot be trained, only a LoRA on them can",
                "Set lora_rank, or give rules to train with quantization in the loop",
            )  # fmt: skip
        if self.rules and self.lora_rank:
            raise SettingsError(
                "rules and lora_rank were given", "a LoRA's base is frozen, rules of training are for weights that "
                "change", "Use quantization=SCHEME for the LoRA's base",
            )  # fmt: skip

    @property
    def folder(self) -> Path:
        """Where everything of this run is written."""
        return Path(self.output_dir) / self.run_name

    def fixed(self) -> dict[str, Any]:
        """The values that a resumed training must share with the one it goes on from, as JSON values."""
        return {row.name: value for row, value in self._values() if not row.metadata.get("free")}

    def text(self) -> str:
        """All values as YAML: JSON is YAML, line by line."""
        return "".join(f"{row.name}: {json.dumps(value)}\n" for row, value in self._values())

    def _values(self) -> list[tuple[Any, Any]]:
        return [(row, json.loads(json.dumps(getattr(self, row.name)))) for row in fields(self)]


_LEAST = {
    "resolution": 0, "max_sequence_length": 0, "max_train_steps": 1, "per_device_batch_size": 1,
    "gradient_accumulation_steps": 1, "learning_rate": 0, "adam_weight_decay": 0, "max_grad_norm": 0, "lora_rank": 0,
    "lora_alpha": 0, "checkpoint_every": 0, "checkpoints_to_keep": 1, "log_every": 1, "sample_every": 0,
    "sample_steps": 1, "seed": 0,
}  # fmt: skip


def _refused(name: str, value: Any, why: str, fix: str = "Use such a value") -> SettingsError:
    return SettingsError(f"{name}={value!r} was given", why, fix)

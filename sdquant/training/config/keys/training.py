"""Keys of training."""

from __future__ import annotations

from typing import Any

from ..value_types import MAXDIFFUSION, OURS, Key

# diffusers.optimization's schedules that need nothing but the number of steps.
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")


def _key(name: str, kind: str, default: Any, help: str, origin: str = OURS, **more: Any) -> Key:
    return Key(name=name, kind=kind, default=default, help=help, commands=("train",), origin=origin, **more)


KEYS = (
    # Data.
    _key("dataset_name", "str", "", "built-in data, instead of a folder", MAXDIFFUSION, choices=("", "digits")),
    _key(
        "train_data_dir", "str", "", "folder of pictures, with metadata.jsonl or name.txt beside name.png",
        MAXDIFFUSION,
    ),
    _key("caption_column", "str", "text", "the caption's key in metadata.jsonl", MAXDIFFUSION),
    _key(
        "cond_dropout", "float", 0.1, "share of captions replaced by the empty one, for guidance without a classifier",
        least=0, most=1,
    ),
    _key(
        "max_sequence_length", "int", None, "tokens of the long text encoder (default: the pipeline's)", MAXDIFFUSION,
        least=1,
    ),
    # Steps.
    _key("max_train_steps", "int", 1000, "optimizer steps in all", MAXDIFFUSION, least=1),
    _key("gradient_accumulation_steps", "int", 1, "forward passes in one step", least=1),
    _key("learning_rate", "float", 1e-5, "the optimizer's highest learning rate", MAXDIFFUSION, least=0),
    _key("lr_scheduler", "str", "cosine", "how the rate changes", choices=SCHEDULES),
    _key(
        "warmup_steps_fraction", "float", 0.1, "share of the steps in which the rate goes up", MAXDIFFUSION,
        least=0, most=1,
    ),
    _key("adam_b1", "float", 0.9, "AdamW's first beta", MAXDIFFUSION, least=0, most=1),
    _key("adam_b2", "float", 0.999, "AdamW's second beta", MAXDIFFUSION, least=0, most=1),
    _key("adam_eps", "float", 1e-8, "AdamW's epsilon", MAXDIFFUSION, least=0),
    _key("adam_weight_decay", "float", 0.0, "AdamW's weight decay", MAXDIFFUSION, least=0),
    _key("max_grad_norm", "float", 1.0, "gradients are scaled down to this norm; 0 for any", MAXDIFFUSION, least=0),
    _key("mixed_precision", "str", "no", "what the forward pass computes in", choices=("no", "bf16", "fp16")),
    _key("ema", "float", 0.0, "decay of averaged weights, which are drawn with and kept; 0 for none", least=0, most=1),
    _key("guidance_min", "float", 3.5, "lowest of the guidance inputs drawn, of networks that have one", least=0),
    _key("guidance_max", "float", 3.5, "the highest", least=0),
    _key("distillation", "bool", False, "learn the answers of the unquantized network instead of the data's"),
    # LoRA.
    _key("lora_rank", "int", 0, "train a LoRA of this rank on a frozen network; 0 trains the network", least=0),
    _key("lora_alpha", "float", None, "the LoRA's alpha (default: its rank)", least=0),
    _key("lora_dropout", "float", 0.0, "share of the LoRA's inputs dropped, below 1", least=0, most=1),
    _key(
        "lora_target_modules", "names", ("to_q", "to_k", "to_v", "to_out.0"),
        "layers that the LoRA is put on: the ends of their paths",
    ),
    # What is written.
    _key(
        "checkpoint_every", "int", 250, "steps from checkpoint to checkpoint; 0 for one at the end", MAXDIFFUSION,
        least=0,
    ),
    _key("checkpoints_to_keep", "int", 2, "how many of the last checkpoints are kept", least=1),
    _key("resume", "str", "", "go on from 'latest', or from 'step-250'; '' starts afresh"),
    _key("log_every", "int", 1, "steps from line to line of log.jsonl", least=1),
    _key("sample_every", "int", 0, "steps from sheet to sheet of pictures; 0 for one at the end", least=0),
    _key("sample_prompts", "names", (), "what is drawn on a sheet (default: captions of the data)"),
    _key("sample_steps", "int", 20, "denoising steps of a picture on a sheet", least=1),
)  # fmt: skip

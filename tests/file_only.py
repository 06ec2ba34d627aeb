"""Shipped models in the schemes that sdquant reads from files alone, for tests that take every scheme."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant

from . import hub_formats
from .backends.comfy_layers import line
from .backends.test_comfy_mixed import KINDS
from .hub_formats import rewrite

MAIN = {"digits-sd": "unet", "digits-flux": "transformer"}
WEIGHTS = "diffusion_pytorch_model.safetensors"


def quantized_folder(model: str, scheme: str, target: Path) -> Path:
    """Write the folder of a shipped model, its network in a scheme that sdquant does not make."""
    shutil.copytree(sdquant.demo.path(model), target)
    part = target / MAIN[model]
    if scheme == "sdnq-other":
        _by_sdnq(part)
    elif scheme.startswith("hub-"):
        rewrite(part, next(kind for kind in hub_formats.KINDS.values() if kind.quant == scheme))
    else:
        tensors = load_file(part / WEIGHTS)
        rows = (_layer(name, tensor, _COMFY[scheme]) for name, tensor in tensors.items())
        save_file({name: value.contiguous() for row in rows for name, value in row.items()}, part / WEIGHTS)
    return target


def _layer(name: str, tensor: Tensor, write: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    if tensor.ndim != 2 or any(size % 64 for size in tensor.shape) or "embed" in name:
        return {name: tensor}
    stem = name.removesuffix("weight")
    tensors, said, _ = write(tensor.float())
    return {stem + key: part for key, part in tensors.items()} | {f"{stem}comfy_quant": line(said)}


_COMFY: dict[str, Callable[[Tensor], Any]] = {"awq_w4a16": KINDS["awq_w4a16"]}


def _by_sdnq(part: Path) -> None:
    """Let SDNQ write it in a type that is no scheme of its own here."""
    import diffusers
    import sdnq

    cls = {"unet": diffusers.UNet2DConditionModel, "transformer": diffusers.FluxTransformer2DModel}[part.name]
    config = sdnq.SDNQConfig(weights_dtype="int5", minimum_allowed_numel=0)
    model = cls.from_pretrained(part, quantization_config=config, torch_dtype=torch.bfloat16)
    shutil.rmtree(part)
    model.save_pretrained(part)

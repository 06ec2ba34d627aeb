"""Shipped models in the schemes that sdquant reads from files alone, for tests that take every scheme."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant

from . import hub_formats
from .backends import nunchaku_layers
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
    elif scheme == "svdquant_nvfp4":
        _by_nunchaku_lite(part)
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


_COMFY: dict[str, Callable[[Tensor], Any]] = {
    "svdquant_w4a4": KINDS["svdquant_w4a4"], "awq_w4a16": KINDS["awq_w4a16"],
}  # fmt: skip


def _by_nunchaku_lite(part: Path) -> None:
    tensors = load_file(part / WEIGHTS)
    layers = [key.removesuffix(".weight") for key, tensor in tensors.items() if _is_wide(tensor)]
    for name in layers:
        weight, bias = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.bias", None)
        file, _, _ = nunchaku_layers.svdquant(weight, bias, nvfp4=True, names=nunchaku_layers.V2)
        tensors |= {f"{name}.{key}": value for key, value in file.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, part / WEIGHTS)
    config = json.loads((part / "config.json").read_text())
    method = {"quant_method": "nunchaku_lite", "compute_dtype": "bfloat16"}
    (part / "config.json").write_text(json.dumps(config | {"quantization_config": method}))


def _is_wide(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not any(size % 128 for size in tensor.shape)


def _by_sdnq(part: Path) -> None:
    """Let SDNQ write it in a type that is no scheme of its own here."""
    import diffusers
    import sdnq

    cls = {"unet": diffusers.UNet2DConditionModel, "transformer": diffusers.FluxTransformer2DModel}[part.name]
    config = sdnq.SDNQConfig(weights_dtype="int5", minimum_allowed_numel=0)
    model = cls.from_pretrained(part, quantization_config=config, torch_dtype=torch.bfloat16)
    shutil.rmtree(part)
    model.save_pretrained(part)

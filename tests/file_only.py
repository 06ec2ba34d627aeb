"""Shipped models in the schemes that sdquant reads from files alone, for tests that take every scheme, and in formats
of files, for those that take every format: layers of all kinds that a library writes, by turns."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant

from . import hub_formats
from .backends import nunchaku_layers, torchao_layers
from .backends.comfy_layers import line
from .backends.test_comfy_mixed import KINDS
from .backends.test_modelopt import KINDS as modelopt
from .hub_formats import rewrite

MAIN = {"digits-sd": "unet", "digits-flux": "transformer"}
WEIGHTS = "diffusion_pytorch_model.safetensors"


# Formats, and the scheme that stands for each.
FORMATS: Mapping[str, str] = {
    "comfy": "svdquant_w4a4", "gptq shuffled": "hub-int4", "awq": "hub-int4", "hqq": "hub-int4",
    "hqq axis 0": "hub-int4", "ct w4a16 asymmetric": "hub-int4", "ct w3a16": "hub-int3", "fp8 small blocks": "fp8",
    "torchao": "hub-int4", "modelopt": "hub-int4", "nunchaku int4": "svdquant_w4a4", "nunchaku nvfp4": "svdquant_nvfp4",
}  # fmt: skip


def quantized_folder(model: str, scheme: str, target: Path) -> Path:
    """Write the folder of a shipped model, its network in a scheme that sdquant does not make, or in a format."""
    shutil.copytree(sdquant.demo.path(model), target)
    part = target / MAIN[model]
    if scheme.startswith("nunchaku"):
        _by_nunchaku_lite(part, nvfp4=scheme.endswith("nvfp4"))
    elif scheme == "torchao":
        torchao_layers.digits(part, source=part)
    elif scheme == "modelopt":
        _by_turns(part, [kind for _, kind in modelopt.values()])
        _says(part, {"quant_method": "modelopt", "quant_type": "FP8"})
    elif scheme == "comfy":
        _by_turns(part, [_as_comfy(kind) for kind in KINDS.values()])
    elif scheme in hub_formats.KINDS:
        rewrite(part, hub_formats.KINDS[scheme])
    elif scheme == "sdnq-other":
        _by_sdnq(part)
    elif scheme.startswith("hub-"):
        rewrite(part, next(kind for kind in hub_formats.KINDS.values() if kind.quant == scheme))
    else:
        tensors = load_file(part / WEIGHTS)
        rows = (_layer(name, tensor, _COMFY[scheme]) for name, tensor in tensors.items())
        save_file({name: value.contiguous() for row in rows for name, value in row.items()}, part / WEIGHTS)
    return target


def _by_turns(part: Path, makers: Sequence[Callable[[Tensor], tuple[dict[str, Tensor], Any]]]) -> None:
    file: dict[str, Tensor] = {}
    turn = itertools.cycle(makers)
    for name, tensor in load_file(part / WEIGHTS).items():
        if not hub_formats.is_packable(name, tensor):
            file[name] = tensor
            continue
        layer, _ = next(turn)(tensor.float())
        file |= {f"{name.removesuffix('weight')}{key}": value.clone() for key, value in layer.items()}
    save_file({name: tensor.contiguous() for name, tensor in file.items()}, part / WEIGHTS)


def _as_comfy(kind: Callable[[Tensor], Any]) -> Callable[[Tensor], tuple[dict[str, Tensor], Any]]:
    def make(weight: Tensor) -> tuple[dict[str, Tensor], Any]:
        tensors, said, floats = kind(weight)
        return {**tensors, "comfy_quant": line(said)}, floats

    return make


def _says(part: Path, method: Mapping[str, Any]) -> None:
    config = json.loads((part / "config.json").read_text())
    (part / "config.json").write_text(json.dumps(config | {"quantization_config": dict(method)}))


def _layer(name: str, tensor: Tensor, write: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    if tensor.ndim != 2 or any(size % 64 for size in tensor.shape) or "embed" in name:
        return {name: tensor}
    stem = name.removesuffix("weight")
    tensors, said, _ = write(tensor.float())
    return {stem + key: part for key, part in tensors.items()} | {f"{stem}comfy_quant": line(said)}


_COMFY: dict[str, Callable[[Tensor], Any]] = {"awq_w4a16": KINDS["awq_w4a16"]}


def _by_nunchaku_lite(part: Path, *, nvfp4: bool) -> None:
    tensors = load_file(part / WEIGHTS)
    layers = [key.removesuffix(".weight") for key, tensor in tensors.items() if _is_wide(tensor)]
    for name in layers:
        weight, bias = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.bias", None)
        file, _, _ = nunchaku_layers.svdquant(weight, bias, nvfp4=nvfp4, names=nunchaku_layers.V2)
        tensors |= {f"{name}.{key}": value for key, value in file.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, part / WEIGHTS)
    _says(part, {"quant_method": "nunchaku_lite", "compute_dtype": "bfloat16"})


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

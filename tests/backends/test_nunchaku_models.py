"""Nunchaku's files of other models, in folders, in diffusers' nunchaku_lite, and its text encoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant.errors import UnsupportedFileError
from sdquant.nn import quantized

from ..test_load_modes import images
from . import nunchaku_layers as layers

# family, class, the writer, sizes of a small model, a layer whose names or rows differ.
MODELS: dict[str, tuple[str, Callable[[Mapping[str, Tensor]], layers.Model], dict[str, Any]]] = {
    "qwen-image": ("QwenImageTransformer2DModel", layers.qwen_image, {
        "num_layers": 1, "attention_head_dim": 128, "num_attention_heads": 1, "joint_attention_dim": 64,
    }),
    "z-image": ("ZImageTransformer2DModel", layers.z_image, {
        "dim": 384, "n_heads": 3, "n_kv_heads": 3, "n_layers": 1, "n_refiner_layers": 1, "cap_feat_dim": 64,
        "axes_dims": [32, 48, 48],
    }),
    "sdxl": ("UNet2DConditionModel", layers.sdxl, {
        "block_out_channels": [128, 128], "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "cross_attention_dim": 64, "attention_head_dim": [2, 2],
        "layers_per_block": 1, "transformer_layers_per_block": [1, 1], "use_linear_projection": True,
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
        "sample_size": 8, "norm_num_groups": 32,
    }),
}  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
def test_other_models(family: str, tmp_path: Path) -> None:
    """The layers of a model that is loaded from its file have the weights and biases that were written."""
    class_name, write, sizes = MODELS[family]
    generator = torch.Generator().manual_seed(3)
    model = getattr(diffusers, class_name).from_config(sizes)
    weights = {
        name: (torch.randn(tensor.shape, generator=generator) * 0.05).bfloat16()
        for name, tensor in model.state_dict().items()
    }
    config = {"_class_name": class_name, **sizes}
    made = write(weights)
    path = made.save(tmp_path / "svdq-int4_r16.safetensors", layers.metadata(config, name=f"Nunchaku{class_name}"))
    seen = sdquant.detect(path)
    assert (seen.family, seen.quant, seen.warnings) == (family, "svdquant_w4a4", [])
    theirs, mine = load_file(tmp_path / "floats.safetensors"), dict(sdquant.dequantize(path))
    assert mine.keys() == theirs.keys() == weights.keys()
    for name, tensor in theirs.items():
        assert (mine[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    folder = tmp_path / "model"
    folder.mkdir()
    path.rename(folder / path.name)
    (folder / "config.json").write_text(json.dumps(config))
    assert sdquant.verify(folder).quant == "svdquant_w4a4"
    loaded = sdquant.load_model(folder, dtype="float32", progress=False)
    packs = dict(quantized(loaded))
    assert len(packs) == sum(key.endswith("qweight") for key in made.file) + sum(
        2 for key in made.file if key.endswith(("qkv.qweight", "qkv_proj.qweight"))
    ) + (family == "z-image")
    values = dict(loaded.named_parameters()) | {
        name: packed.spec.scheme.codec.decode(packed, torch.float32) for name, packed in packs.items()
    }
    for name, tensor in theirs.items():
        assert (values[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def _written(folder: Path, flux: Path, make: Callable[[Mapping[str, Tensor]], layers.Model]) -> tuple[Path, Any]:
    weights = load_file(flux / "transformer" / "diffusion_pytorch_model.safetensors")
    config = json.loads((flux / "transformer" / "config.json").read_text())
    return make(weights).save(folder / "svdq.safetensors", None), config


def _draws(place: Path, floats: Path, flux: Path) -> None:
    values: dict[str, Any] = {"base": flux, "dtype": "float32", "progress": False}
    mine = images(sdquant.load_model(place, **values), 1)
    assert np.abs(mine.astype(int) - images(sdquant.load_model(floats, **values), 1)).max() <= 1


def test_the_folders_of_before(flux: Path, tmp_path: Path) -> None:
    path, config = _written(tmp_path, flux, layers.flux)
    folder, file = tmp_path / "folder", load_file(path)
    folder.mkdir()
    for name, is_block in (("transformer_blocks", True), ("unquantized_layers", False)):
        some = {key: tensor for key, tensor in file.items() if ("_blocks." in key) is is_block}
        save_file(some, folder / f"{name}.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    seen = sdquant.verify(folder)
    assert (seen.family, seen.quant) == ("flux", "svdquant_w4a4")
    _draws(folder, tmp_path / "floats.safetensors", flux)


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_nunchaku_lite(kind: str, flux: Path, tmp_path: Path) -> None:
    path, config = _written(tmp_path, flux, lambda weights: layers.lite(weights, nvfp4=kind == "nvfp4"))
    folder = tmp_path / "folder"
    folder.mkdir()
    path.rename(folder / "diffusion_pytorch_model.safetensors")
    method = {"quant_method": "nunchaku_lite", "compute_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    assert sdquant.verify(folder).quant == ("svdquant_nvfp4" if kind == "nvfp4" else "svdquant_w4a4")
    _draws(folder, tmp_path / "floats.safetensors", flux)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFileError, match="nothing tells whether its rows are interleaved"):
        sdquant.detect(folder)


def test_its_text_encoder(flux: Path, tmp_path: Path) -> None:
    """T5 in AWQ by groups of 128: the layers of transformers, in words of 16 bits."""
    weights = load_file(next((flux / "text_encoder_2").glob("*.safetensors")))
    file, floats = {}, {}
    for name, tensor in weights.items():
        if not name.endswith((".q.weight", ".wi_0.weight", ".wo.weight")) or tensor.shape[1] % 128:
            file[name] = floats[name] = tensor
            continue
        groups = tensor.float().view(len(tensor), -1, 128)
        scale = ((groups.amax(-1) - groups.amin(-1)) / 15).bfloat16()
        zero = groups.amin(-1).bfloat16()
        codes = ((groups - zero.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)).round().clamp(0, 15)
        stem = name.removesuffix("weight")
        file[f"{stem}qweight"] = layers.awq_codes(codes.flatten(1), torch.int16)
        file |= {f"{stem}scales": scale.T.contiguous(), f"{stem}scaled_zeros": zero.T.contiguous()}
        floats[name] = (codes * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)).flatten(1)
    assert file.keys() != weights.keys()
    save_file({key: tensor.contiguous() for key, tensor in file.items()}, tmp_path / "awq-int4-t5.safetensors")
    save_file({key: tensor.contiguous() for key, tensor in floats.items()}, tmp_path / "floats.safetensors")
    seen = sdquant.verify(tmp_path / "awq-int4-t5.safetensors")
    assert (seen.family, seen.quant, seen.warnings) == ("t5", "awq_w4a16", [])
    drawn = [
        images(sdquant.load_model(flux, parts=[tmp_path / name], dtype="float32", progress=False), 1)
        for name in ("awq-int4-t5.safetensors", "floats.safetensors")
    ]
    assert np.abs(drawn[0].astype(int) - drawn[1]).max() <= 1

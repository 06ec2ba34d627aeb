"""Nunchaku's files of other models, in folders, in diffusers' nunchaku_lite, and its text encoder."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant.backends import _nunchaku_order as order
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.nn import quantized

from ..test_load_modes import images
from . import nunchaku_layers as layers

# family, class, the writer, sizes of a small model, a layer whose names or rows differ.
MODELS: dict[str, tuple[str, Callable[..., layers.Model], dict[str, Any]]] = {
    "qwen-image": ("QwenImageTransformer2DModel", layers.qwen_image, {
        "num_layers": 1, "attention_head_dim": 128, "num_attention_heads": 1, "joint_attention_dim": 64,
    }),
    "z-image": ("ZImageTransformer2DModel", layers.z_image, {
        "dim": 384, "n_heads": 3, "n_kv_heads": 3, "n_layers": 1, "n_refiner_layers": 1, "cap_feat_dim": 64,
        "axes_dims": [32, 48, 48],
    }),
    "flux2": ("Flux2Transformer2DModel", layers.flux2, {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32, "num_attention_heads": 4,
        "joint_attention_dim": 64, "timestep_guidance_channels": 32, "axes_dims_rope": [8, 8, 8, 8],
    }),
    "sana": ("SanaTransformer2DModel", layers.sana, {
        "num_attention_heads": 5, "attention_head_dim": 32, "num_layers": 1, "num_cross_attention_heads": 5,
        "cross_attention_head_dim": 32, "cross_attention_dim": 160, "caption_channels": 64, "in_channels": 4,
        "out_channels": 4, "sample_size": 8,
    }),
    "sdxl": ("UNet2DConditionModel", layers.sdxl, {
        "block_out_channels": [128, 128], "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "cross_attention_dim": 64, "attention_head_dim": [2, 2],
        "layers_per_block": 1, "transformer_layers_per_block": [1, 1], "use_linear_projection": True,
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
        "sample_size": 8, "norm_num_groups": 32,
    }),
}  # fmt: skip


MODELS["flux2 of before"] = (MODELS["flux2"][0], layers.flux2_of_before, MODELS["flux2"][2])


def _weights(kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Random weights of a model, and its config."""
    class_name, _, sizes = MODELS[kind]
    generator, model = torch.Generator().manual_seed(3), getattr(diffusers, class_name).from_config(sizes)
    weights = {
        name: (torch.randn(tensor.shape, generator=generator) * 0.05).bfloat16()
        for name, tensor in model.state_dict().items()
    }
    return weights, {"_class_name": class_name, **sizes}


def _said(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return layers.metadata(config, name=f"Nunchaku{config['_class_name']}", **more)


@pytest.mark.parametrize("kind", MODELS)
def test_other_models(kind: str, tmp_path: Path) -> None:
    """The layers of a model that is loaded from its file have the weights and biases that were written."""
    family = kind.split()[0]
    weights, config = _weights(kind)
    made = MODELS[kind][1](weights)
    path = made.save(tmp_path / "svdq-int4_r16.safetensors", _said(config))
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
    assert packs.keys() == made.quantized
    values = dict(loaded.named_parameters()) | {
        name: packed.spec.scheme.codec.decode(packed, torch.float32) for name, packed in packs.items()
    }
    for name, tensor in theirs.items():
        assert (values[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def _made(kind: str, folder: Path, **more: Any) -> tuple[Path, Any]:
    """A single file of a model with random weights, and its config; beside it `floats.safetensors`."""
    weights, config = _weights(kind)
    return MODELS[kind][1](weights, **more).save(folder / "svdq.safetensors", _said(config, **more)), config


@pytest.mark.parametrize("nvfp4", [False, True])
def test_sana_computes(nvfp4: bool, tmp_path: Path) -> None:
    """Convolutions of one pixel beside its linear layers, in groups that fit its widths; saved, compiled and cast."""
    path, config = _made("sana", tmp_path, nvfp4=nvfp4)
    folder = tmp_path / "model"
    folder.mkdir()
    path.rename(folder / path.name)
    (folder / "config.json").write_text(json.dumps(config))
    theirs = diffusers.SanaTransformer2DModel.from_config(config)
    theirs.load_state_dict(load_file(tmp_path / "floats.safetensors"), strict=False)
    generator = torch.Generator().manual_seed(5)
    values: dict[str, Any] = {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=generator), "timestep": torch.tensor([7.0, 7.0]),
        "encoder_hidden_states": torch.randn(2, 6, 64, generator=generator), "return_dict": False,
    }  # fmt: skip
    mine = sdquant.load_model(folder, dtype="float32", progress=False)
    with torch.no_grad():
        exact, seen = theirs(**values)[0], mine(**values)[0]
        torch.testing.assert_close(seen, exact, atol=1e-3, rtol=1e-3)
        sdquant.save(mine, tmp_path / "saved")
        again = sdquant.load_model(tmp_path / "saved", dtype="float32", progress=False)
        assert torch.equal(again(**values)[0], seen)
        assert torch.equal(copy.deepcopy(mine)(**values)[0], seen)
        layer, x = mine.transformer_blocks[0].ff.conv_inverted, torch.randn(1, 160, 4, 4, generator=generator)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient[0, :, 0, 0], layer.dequantize().sum(0).flatten(), atol=1e-4, rtol=1e-4)


def _rewritten(path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    file = load_file(path)
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    change(file)
    save_file({key: tensor.contiguous() for key, tensor in file.items()}, path, metadata)
    return path


@pytest.mark.parametrize(
    ("kind", "key", "change", "word"),
    [
        ("sana", "attn.qkv_proj.qweight", lambda t: t[:-128], "by the sizes of the model 768"),
        ("sana", "cross_attn.q_linear.bias", lambda t: t[:-32], "not the bias of its weight"),
        ("sana", "ff.depth_conv.weight", lambda t: t[:100], "cannot be made of"),
        ("sana", "ff.depth_conv.weight", lambda t: t[..., 0], "not one of 4 dimensions"),
        ("sana", "ff.point_conv.qweight", lambda t: t[:, :-64], "belongs to the weight"),
        ("sana", "scale_shift_table", lambda t: t[:, :-32], "by the sizes of the model"),
        ("flux2", "attn.mlp_fc1.smooth_factor", lambda t: t * 2, "divide their inputs by different factors"),
        ("qwen-image", "attn.to_qkv.wtscale", 0.5, "Nunchaku knows only 1"),
        ("qwen-image", "attn.to_qkv.wtscale", 1.0, ""),
        ("qwen-image", "norm.x", "distilled_guidance_layer.in_proj.weight", "do not agree on whether"),
    ],
)  # fmt: skip
def test_what_does_not_fit(kind: str, key: str, change: Any, word: str, tmp_path: Path) -> None:
    def damage(file: dict[str, Tensor]) -> None:
        single = "single_" if "mlp_fc1" in key else ""
        if isinstance(change, str):
            file[change] = torch.zeros(2, 2)
        elif isinstance(change, float):
            file[f"transformer_blocks.0.{key}"] = torch.tensor([change])
        else:
            name = f"{single}transformer_blocks.0.{key}"
            file[name] = change(file[name])

    path = _rewritten(_made(kind, tmp_path)[0], damage)
    if not word:
        assert sdquant.verify(path).warnings == []
        return
    with pytest.raises((BadFileError, UnsupportedFileError), match=word):
        sdquant.verify(path)


def test_factors_of_rows_in_integers(tmp_path: Path) -> None:
    """As Nunchaku's kernels have them in both kinds, though its converter writes them with floats alone."""
    name = "transformer_blocks.0.attn.to_out.0"
    path = _made("qwen-image", tmp_path)[0]
    whole = dict(sdquant.dequantize(path))[f"{name}.weight"]
    factors = torch.linspace(0.5, 2, len(whole)).bfloat16()
    low = _low_rank(path, name)
    _rewritten(path, lambda file: file.update({f"{name}.wcscales": layers.vector(factors)}))
    seen = dict(sdquant.dequantize(path))[f"{name}.weight"]
    torch.testing.assert_close(seen - low, (whole - low) * factors.float()[:, None], atol=1e-5, rtol=1e-5)


def _low_rank(path: Path, name: str) -> Tensor:
    file = load_file(path)
    down, up = (file[f"{name}.proj_{part}"] for part in ("down", "up"))
    return order.up(up).float() @ order.down(down).float().T


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
    said = {"config": (flux / "text_encoder_2" / "config.json").read_text(), "model_class": "NunchakuT5EncoderModel"}
    save_file({key: tensor.contiguous() for key, tensor in file.items()}, tmp_path / "awq-int4-t5.safetensors", said)
    save_file({key: tensor.contiguous() for key, tensor in floats.items()}, tmp_path / "floats.safetensors")
    seen = sdquant.verify(tmp_path / "awq-int4-t5.safetensors")
    assert (seen.family, seen.quant, seen.warnings) == ("t5", "awq_w4a16", [])
    drawn = [
        images(sdquant.load_model(flux, parts=[tmp_path / name], dtype="float32", progress=False), 1)
        for name in ("awq-int4-t5.safetensors", "floats.safetensors")
    ]
    assert np.abs(drawn[0].astype(int) - drawn[1]).max() <= 1

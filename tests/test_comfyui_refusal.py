"""What ComfyUI's own loader does not read, it refuses: it would take codes for weights, and draw noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import sdquant
from sdquant import demo
from sdquant.core import PackedSpec, registry
from sdquant.saving import comfyui_refusal

from . import comfy_safetensors

LAYERS = "_quantization_metadata"


def refused(scheme: str, *names: str, keys: tuple[str, ...] = (), shape: tuple[int, ...] = (8, 8)) -> list[str]:
    """The layers that the metadata names in a file of one quantized weight, the first, and others."""
    spec = PackedSpec(scheme=registry.scheme(scheme), shape=shape, dtype="bfloat16")
    said = comfyui_refusal.refusal({names[0]: spec}, names[1:], [*names, *keys])
    return list(json.loads(said[LAYERS])["layers"]) if said else []


def test_layers_under_the_same_names_are_in_no_format_of_comfyui() -> None:
    assert refused("bnb-int8", "img_in.weight", "proj.weight", "proj.bias") == ["img_in", "proj"]
    assert refused("int8_row", "img_in.weight", "proj.weight", keys=("img_in.comfy_quant",)) == []  # which it reads
    assert refused("int8_row", "conv.weight", keys=("conv.comfy_quant",), shape=(8, 8, 3, 3)) == ["conv"]


@pytest.mark.parametrize(
    "known",
    [
        ("conv_in.weight",),
        ("x_embedder.weight",),
        ("transformer_blocks.0.attn.add_q_proj.weight", "pos_embed.proj.weight"),
        ("adaln_single.emb.timestep_embedder.linear_1.bias", "pos_embed.proj.bias"),
    ],
)
def test_where_comfyui_changes_names_no_format_is_read(known: tuple[str, ...]) -> None:
    for scheme in ("int8_row", "fp8"):
        layers = refused(scheme, "proj.weight", *known, keys=("proj.comfy_quant",))
        assert len(layers) > 5 and all(layer.startswith(comfy_safetensors.INNER) for layer in layers)


@pytest.mark.parametrize("scheme", ["int8_convrot", "fp8"])
def test_a_transformer_in_a_file_of_its_own(scheme: str, tmp_path: Path) -> None:
    pipe = sdquant.load_model(demo.path("digits-flux"), scheme, components=["transformer"], progress=False)
    file = tmp_path / "flux.safetensors"
    sdquant.save(pipe.transformer, file)
    with pytest.raises(comfy_safetensors.Refused, match="Could not detect"):
        comfy_safetensors.read(file)
    again = sdquant.load_model(file, progress=False)
    assert "quantized" in repr(again).lower()
    first, other = (dict(sdquant.nn.quantized(one)) for one in (pipe.transformer, again))
    assert first.keys() == other.keys()
    assert all(
        torch.equal(first[name].parts[part], other[name].parts[part]) for name in first for part in first[name].parts
    )


def test_a_text_encoder_in_a_file_of_its_own(tmp_path: Path) -> None:
    pipe = sdquant.load_model(demo.path("digits-sd"), "bnb-int8", components=["text_encoder"], progress=False)
    sdquant.save(pipe.text_encoder, tmp_path / "codes.safetensors")
    norms = {
        key: one for key, one in load_file(tmp_path / "codes.safetensors").items() if "norm" in key and one.ndim == 2
    }
    assert len(norms) == 1  # in a shape that its model does not have
    again = sdquant.load_model(tmp_path / "codes.safetensors", progress=False)
    words = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(words)[0], pipe.text_encoder(words)[0])

    with pytest.raises(AttributeError, match="has no attribute 'items'"):  # of CLIP under transformers' names
        comfyui_layers(tmp_path / "codes.safetensors")

    t5 = sdquant.load_model(demo.path("digits-flux") / "text_encoder_2", "int8_row", progress=False)
    sdquant.save(t5, tmp_path / "read.safetensors")
    with safe_open(tmp_path / "read.safetensors", "pt") as file:
        assert LAYERS not in file.metadata()  # ComfyUI reads it
    assert all(
        one.ndim == 1 for key, one in load_file(tmp_path / "read.safetensors").items() if key.endswith("norm.weight")
    )


@pytest.mark.parametrize("scheme", ["qint8", "fp8"])  # which have no tensor `weight`, by which ComfyUI would know a T5
def test_a_text_encoder_that_comfyui_would_not_know(tmp_path: Path, scheme: str) -> None:
    t5 = sdquant.load_model(demo.path("digits-flux") / "text_encoder_2", scheme, progress=False)
    file = tmp_path / "t5.safetensors"
    sdquant.save(t5, file)
    with pytest.raises(AttributeError, match="has no attribute 'items'"):
        comfyui_layers(file)
    assert sdquant.detect(file).quant == scheme
    again = sdquant.load_model(file, progress=False)
    assert again.state_dict().keys() == t5.state_dict().keys()
    assert all(torch.equal(one, t5.state_dict()[key]) for key, one in again.state_dict().items())


def comfyui_layers(file: Path) -> list[str]:
    """What ComfyUI 0.33.0 does with a file's metadata before it looks at a text encoder (`convert_old_quants`)."""
    with safe_open(file, "pt") as opened:
        said = json.loads(opened.metadata()[LAYERS])["layers"]
    return [layer for layer, _ in said.items()]

"""Text encoders in ComfyUI's stand-in: the shipped T5 and CLIP, from floats and from GGUF."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

import sdquant
from sdquant import backends
from sdquant.errors import UnsupportedFileError
from sdquant.hosts import comfy_load
from sdquant.nn.weights import quantized

from ..gguf_text_encoders import ARCH, write_text
from .test_comfyui import FLUX, run

QUERY = "encoder.block.0.layer.0.SelfAttention.q.weight"


def _file(comfy: SimpleNamespace, part: str) -> Path:
    (source,) = (sdquant.demo.path(FLUX) / part).glob("*.safetensors")
    return Path(shutil.copy(source, comfy.encoders / f"{part}.safetensors"))


def _clip(comfy: SimpleNamespace, *names: str, type: str = "flux", quantize: str = comfy_load.AS_FOUND) -> Any:
    first, *rest = names
    more = {f"clip_name{at}": name for at, name in enumerate(rest, 2)}
    return run(comfy, "LoadCLIP", clip_name=first, type=type, quantize=quantize, **more)[0]


def test_both_encoders_of_flux_are_quantized_under_comfyuis_names(comfy: SimpleNamespace) -> None:
    clip_l, t5 = _file(comfy, "text_encoder"), _file(comfy, "text_encoder_2")
    clip = _clip(comfy, clip_l.name, t5.name, quantize="int8_row")
    packed, state = dict(quantized(clip.patcher.model)), load_file(t5)
    assert "clip_l.text_model.encoder.layers.0.mlp.fc1.weight" in packed  # transformers 5 calls it encoder.layers...
    row = packed[f"t5xxl.{QUERY}"]
    meant = row.spec.scheme.codec.encode(state[QUERY], backends.parse("int8_row"))
    assert all(torch.equal(part, meant.parts[name]) for name, part in row.parts.items())
    assert not any("shared" in name or "relative" in name or "embed" in name for name in packed)
    assert comfy.comfy.sd.SEEN["clip"][1].name == "FLUX" and clip.patcher.is_clip


def test_a_lora_works_on_packed_encoders_and_goes(comfy: SimpleNamespace) -> None:
    clip = _clip(comfy, _file(comfy, "text_encoder_2").name, quantize="int8_row")
    key = "t5xxl.encoder.block.0.layer.0.SelfAttention.v.weight"
    x = torch.randn(1, 3, 128)

    def out(patcher: Any) -> torch.Tensor:
        comfy.comfy.model_management.load_models_gpu([patcher])
        with torch.no_grad():
            found: torch.Tensor = patcher.model.t5xxl(x)
        return found

    before, changed = out(clip.patcher), clip.patcher.clone()
    shape = dict(quantized(clip.patcher.model))[key].spec.shape
    assert changed.add_patches({key: (0.05 * torch.randn(shape),)}) == [key]
    assert (out(changed) - before).norm() > 0.01 * before.norm()
    assert torch.equal(out(clip.patcher), before)


def test_a_file_that_comfyuis_own_loader_refuses_for_a_norm_has_it_in_its_shape(comfy: SimpleNamespace) -> None:
    model = sdquant.load_model(
        sdquant.demo.path(FLUX), "bnb-int8", components=["text_encoder_2"], progress=False
    ).text_encoder_2
    sdquant.save(model, comfy.encoders / "ours.safetensors")
    stored = load_file(comfy.encoders / "ours.safetensors")
    (norm,) = [key for key, tensor in stored.items() if "norm" in key and tensor.ndim == 2]
    clip = _clip(comfy, "ours.safetensors")
    read = dict(clip.patcher.model.named_parameters())[f"t5xxl.{norm}"]
    assert torch.equal(read.float(), stored[norm][0].float())
    assert quantized(clip.patcher.model)


def test_a_gguf_file_has_the_weights_of_llama_cpp(comfy: SimpleNamespace) -> None:
    model = sdquant.load_model(sdquant.demo.path(FLUX), dtype="float32", progress=False).text_encoder_2
    worth = write_text(model, comfy.encoders / "t5.gguf", ARCH.T5ENCODER, gguf.GGMLQuantizationType.Q8_0)
    packed = dict(quantized(_clip(comfy, "t5.gguf").patcher.model))
    row = packed[f"t5xxl.{QUERY}"]
    assert row.spec.scheme.name == "q8_0"
    assert torch.equal(row.spec.scheme.codec.decode(row, torch.float32), torch.from_numpy(worth[QUERY]))


def test_what_is_no_text_encoder_is_refused(comfy: SimpleNamespace) -> None:
    (source,) = (sdquant.demo.path(FLUX) / "vae").glob("*.safetensors")
    shutil.copy(source, comfy.encoders / "vae.safetensors")
    with pytest.raises(UnsupportedFileError, match="it is a vae"):
        _clip(comfy, "vae.safetensors")

"""sdquant through transformers' own `from_pretrained` and `save_pretrained`: the text encoders."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.quantizers import PipelineQuantizationConfig
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, T5EncoderModel

import sdquant
from sdquant import demo
from sdquant.models.generate import draw
from sdquant.nn import QuantizedLayer
from sdquant.nn.weights import quantized

from .test_diffusers_quantizer import damage_scale, same

CLIP = demo.path("digits-sd") / "text_encoder"
T5 = demo.path("digits-flux") / "text_encoder_2"


@pytest.mark.parametrize("quant", ["int8", "qint4", "nf4,double_quant", "sdnq-uint4", "int8,embeddings"])
@pytest.mark.parametrize(("cls", "folder"), [(CLIPTextModel, CLIP), (T5EncoderModel, T5)])
def test_on_the_fly_saved_and_loaded_again(cls: Any, folder: Path, quant: str, tmp_path: Path) -> None:
    ours = sdquant.load_model(folder, quant, runtime="plain", progress=False)
    model = cls.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=sdquant.Config(quant))
    same(model, ours)
    model.save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "sdquant", "quant": quant, "skip": []}
    same(cls.from_pretrained(tmp_path / "out", dtype=torch.bfloat16), ours)
    same(sdquant.load_model(tmp_path / "out", runtime="plain", progress=False), ours)


def test_a_pipeline(tmp_path: Path) -> None:
    """Quantized by diffusers in both libraries, saved, and loaded again."""
    folder, parts = demo.path("digits-flux"), ["transformer", "text_encoder_2"]

    def picture(pipe: Any) -> bytes:
        drawn: bytes = draw(pipe, ["a photo of the digit 3"], seeds=[1], steps=2)[0].tobytes()
        return drawn

    mapping = PipelineQuantizationConfig(quant_mapping={part: sdquant.Config("int8") for part in parts})
    theirs = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=mapping)
    ours = sdquant.load_model(folder, "int8", components=parts, progress=False)
    assert all(dict(quantized(getattr(theirs, part))) for part in parts)
    assert picture(theirs) == picture(ours)
    theirs.save_pretrained(tmp_path / "out")
    assert picture(DiffusionPipeline.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)) == picture(ours)


def test_floats_again(tmp_path: Path) -> None:
    model = T5EncoderModel.from_pretrained(
        T5, dtype=torch.bfloat16, quantization_config=sdquant.Config("int8,embeddings")
    )
    tokens = torch.tensor([[3, 4, 5, 1]])
    wanted = model(tokens).last_hidden_state
    weights = {
        path: module.dequantize(torch.bfloat16)
        for path, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
    }
    floats = model.dequantize()
    assert not any(isinstance(module, QuantizedLayer) for module in floats.modules())
    assert floats.shared.weight is floats.encoder.embed_tokens.weight
    floats.save_pretrained(tmp_path)
    assert weights and all(torch.equal(floats.get_submodule(path).weight, weights[path]) for path in weights)
    # Where a CPU has no 16-bit instructions, kernels for packed weights sum in another order than torch's products.
    torch.testing.assert_close(floats(tokens).last_hidden_state, wanted, rtol=0.05, atol=0.05)
    again = dict(T5EncoderModel.from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters())
    assert again and all(torch.equal(again[name], tensor) for name, tensor in floats.named_parameters())


def test_a_copy_is_saved_as_itself(tmp_path: Path) -> None:
    model = CLIPTextModel.from_pretrained(CLIP, dtype=torch.bfloat16, quantization_config=sdquant.Config("int8"))
    copy.deepcopy(model).save_pretrained(tmp_path)
    same(CLIPTextModel.from_pretrained(tmp_path, dtype=torch.bfloat16), model)


class TestRefused:
    def test_parts_on_disk(self, tmp_path: Path) -> None:
        with pytest.raises(sdquant.IncompatibleError, match="offload='balanced'"):
            T5EncoderModel.from_pretrained(
                T5,
                quantization_config=sdquant.Config("int8"),
                device_map={"shared": "cpu", "encoder": "disk"},
                offload_folder=tmp_path,
            )

    def test_weights_of_another_model(self, tmp_path: Path) -> None:
        sdquant.save(sdquant.load_model(CLIP, "int8", progress=False), tmp_path / "out")
        path = tmp_path / "out" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 64}))
        with pytest.raises(sdquant.BadFileError, match="the model expects"):
            CLIPTextModel.from_pretrained(tmp_path / "out")

    def test_a_weight_of_another_shape(self, tmp_path: Path) -> None:
        """transformers leaves the shapes of what is quantized to the quantizer, and tells its error in its own way."""
        shutil.copytree(CLIP, tmp_path / "model")
        file = tmp_path / "model" / "model.safetensors"
        tensors = load_file(file)
        name = next(name for name in tensors if name.endswith("q_proj.weight"))
        tensors[name] = tensors[name][:-1].contiguous()
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(RuntimeError, match="automatic conversion"):
            CLIPTextModel.from_pretrained(tmp_path / "model", quantization_config=sdquant.Config("int8"))

    @pytest.mark.parametrize("scheme", ["int8", "qint3", "fp8", "int4"])
    @pytest.mark.parametrize("damage", ["not finite", "short"])
    def test_damaged_contents(self, scheme: str, damage: str, tmp_path: Path) -> None:
        """As `load_model` does, and not at the first picture."""
        sdquant.save(sdquant.load_model(CLIP, scheme, progress=False), tmp_path / "out")
        damage_scale(tmp_path / "out", damage)
        with pytest.raises(RuntimeError, match="automatic conversion"):
            CLIPTextModel.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)

    def test_a_file_without_what_sdquant_wrote_into_it(self, tmp_path: Path) -> None:
        sdquant.save(sdquant.load_model(CLIP, "int8", progress=False), tmp_path / "out")
        file = tmp_path / "out" / "model.safetensors"
        save_file(load_file(file), file)
        with pytest.raises(sdquant.BadFileError, match="the file has no sdquant metadata"):
            CLIPTextModel.from_pretrained(tmp_path / "out")

"""`save_pretrained` and `dequantize` of models that sdquant loaded or quantized itself: calls of diffusers and of
transformers, which would write packed parts as tensors of a float model if nobody told them otherwise."""

from __future__ import annotations

import copy
import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from safetensors import safe_open
from torch import nn
from transformers import CLIPTextModel, T5EncoderModel

import sdquant
from sdquant import demo
from sdquant.cli import main
from sdquant.models.generate import draw
from sdquant.nn.weights import quantized
from sdquant.rules.model_rules import rules_of_model
from sdquant.training.lora import add_lora

from .test_diffusers_quantizer import same

SD, FLUX = demo.path("digits-sd"), demo.path("digits-flux")
PARTS: list[tuple[Any, Path]] = [
    (UNet2DConditionModel, SD / "unet"),
    (CLIPTextModel, SD / "text_encoder"),
    (FluxTransformer2DModel, FLUX / "transformer"),
    (T5EncoderModel, FLUX / "text_encoder_2"),
]
RULES = [{"module_path": ".*", "weight_qtype": "int4", "act_qtype": "int8"}]
PRODUCTS = [{"op_names": ["sdpa"], "act_qtype": "int8"}]  # of activations alone


def written(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """The tensors of a component's file, its own metadata, and what the config says of quantization."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # it is no mapping
        metadata = json.loads((opened.metadata() or {}).get("sdquant", "{}"))
    return tensors, metadata, json.loads((folder / "config.json").read_text()).get("quantization_config")


def alike(one: Path, other: Path) -> None:
    """The same is written in two folders, but for what transformers adds to a config."""
    (ours, own, said), (theirs, there, told) = written(one), written(other)
    assert ours.keys() == theirs.keys() and said == told and own["weights"] == there["weights"]
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype and torch.equal(tensor, theirs[key]), key


def test_what_it_writes_is_what_save_writes(tmp_path: Path) -> None:
    for (cls, folder), quant, runtime in [
        (PARTS[0], "int8", "plain"), (PARTS[0], "nf4", "library"), (PARTS[0], "qint3", "plain"),
        (PARTS[0], "sdnq-uint4", "plain"), (PARTS[1], "nf4", "plain"), (PARTS[1], "int4", "plain"),
        (PARTS[2], "nf4", "plain"), (PARTS[2], "qint8", "library"), (PARTS[3], "fp8", "plain"),
        (PARTS[3], "bnb-int8", "library"), (PARTS[3], "int8,embeddings", "plain"),
    ]:  # fmt: skip
        model = sdquant.load_model(folder, quant, runtime=runtime, progress=False)
        place = tmp_path / f"{cls.__name__}-{quant}-{runtime}"
        model.save_pretrained(place / "theirs")
        sdquant.save(model, place / "ours")
        alike(place / "ours", place / "theirs")
        again = sdquant.load_model(place / "theirs", runtime=runtime, progress=False)
        same(again, model)
        if written(place / "ours")[2]["quant_method"] == "sdquant":
            same(cls.from_pretrained(place / "theirs", dtype=torch.bfloat16), again)


@pytest.mark.parametrize("rules", [RULES, PRODUCTS])
def test_by_rules(rules: Any, tmp_path: Path) -> None:
    model = sdquant.load_model(SD / "unet", rules=rules, progress=False)
    model.save_pretrained(tmp_path / "theirs")
    sdquant.save(model, tmp_path / "ours")
    alike(tmp_path / "ours", tmp_path / "theirs")
    assert written(tmp_path / "theirs")[1]["rules"] == written(tmp_path / "ours")[1]["rules"] != []
    again = sdquant.load_model(tmp_path / "theirs", progress=False)
    other = UNet2DConditionModel.from_pretrained(SD / "unet", quantization_config=sdquant.Config(rules=rules))
    other.save_pretrained(tmp_path / "by diffusers")
    third = UNet2DConditionModel.from_pretrained(tmp_path / "by diffusers")
    assert rules_of_model(again) == rules_of_model(model) == rules_of_model(other) == rules_of_model(third) != []
    if rules is RULES:
        same(again, model)
        same(third, other)


def test_a_gguf_file(tmp_path: Path) -> None:
    assert main(["quantize", str(SD / "unet"), str(tmp_path / "unet.gguf"), "--quant", "q8_0"]) == 0
    model = sdquant.load_model(tmp_path / "unet.gguf", progress=False)
    model.save_pretrained(tmp_path / "theirs")
    same(sdquant.load_model(tmp_path / "theirs", progress=False), model)


@pytest.mark.parametrize("offload", ["none", "model", "sequential", "balanced", "group"])
def test_an_offloaded_pipeline(offload: str, tmp_path: Path) -> None:
    """All of it, floats too; the mode is at work again afterwards."""
    wanted = sdquant.load_model(SD, "int8", progress=False)
    pipe = sdquant.load_model(SD, "int8", offload, budget="2MB" if offload == "balanced" else None, progress=False)
    draw(pipe, ["a one"], seeds=[1], steps=1)
    pipe.save_pretrained(tmp_path / "saved")
    handle = pipe.sdquant.offload
    assert handle.active and handle.mode == offload
    picture = draw(pipe, ["a one"], seeds=[1], steps=1)[0].tobytes()
    assert picture == draw(wanted, ["a one"], seeds=[1], steps=1)[0].tobytes()
    again = sdquant.load_model(tmp_path / "saved", progress=False)
    same(again.unet, wanted.unet)
    same(again.text_encoder, wanted.text_encoder)
    vae = dict(wanted.vae.named_parameters())
    assert all(torch.equal(tensor, vae[name]) for name, tensor in again.vae.named_parameters())


def test_after_quantize(tmp_path: Path) -> None:
    model = UNet2DConditionModel.from_pretrained(SD / "unet")
    model.save_pretrained(tmp_path / "floats")  # which is not concerned
    assert written(tmp_path / "floats")[2] is None
    sdquant.quantize(model, "int4", progress=False)
    model.save_pretrained(tmp_path / "saved")
    same(sdquant.load_model(tmp_path / "saved", progress=False), model)


class TestLife:
    def test_a_copy_is_saved_as_itself(self, tmp_path: Path) -> None:
        model = sdquant.load_model(SD / "unet", "int8", progress=False)
        other = copy.deepcopy(model)
        for tensor in other.parameters():
            if tensor.is_floating_point():
                tensor.data.zero_()
        other.save_pretrained(tmp_path)
        same(sdquant.load_model(tmp_path, progress=False), other)

    def test_pickled(self, tmp_path: Path) -> None:
        model = sdquant.load_model(SD / "unet", "int8", progress=False)
        torch.save(model, tmp_path / "model.pt")
        other = torch.load(tmp_path / "model.pt", weights_only=False)
        other.save_pretrained(tmp_path / "saved")
        same(sdquant.load_model(tmp_path / "saved", progress=False), model)

    def test_freed_with_its_last_reference(self) -> None:
        model = sdquant.load_model(SD / "unet", "int8", progress=False)
        there = weakref.ref(model)
        gc.collect()
        gc.disable()
        try:
            del model
            assert there() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize(("quant", "runtime"), [("int8", "plain"), ("nf4", "library"), ("qint8", "library")])
    @pytest.mark.parametrize("row", [0, 1])
    def test_floats_again(self, row: int, quant: str, runtime: str, tmp_path: Path) -> None:
        cls, folder = PARTS[row]
        model = sdquant.load_model(folder, quant, runtime=runtime, progress=False)
        wanted = {name: packed.spec.scheme.codec.decode(packed, torch.bfloat16) for name, packed in quantized(model)}
        model.dequantize()
        assert wanted and not dict(quantized(model))
        assert {type(model.get_submodule(name[:-7])) for name in wanted} <= {nn.Linear, nn.Conv2d, nn.Embedding}
        model.save_pretrained(tmp_path)
        assert written(tmp_path)[1:] == ({}, None)
        for again in (
            cls.from_pretrained(tmp_path, dtype=torch.bfloat16),
            sdquant.load_model(tmp_path, progress=False),
        ):
            for name, tensor in wanted.items():
                assert torch.equal(again.get_parameter(name), tensor.reshape(again.get_parameter(name).shape)), name


def test_peft_saves_what_it_put_around_one(tmp_path: Path) -> None:
    """It asks the model's config for its quantization."""
    model = sdquant.load_model(SD / "unet", "nf4", progress=False)
    around = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["to_q"]))
    around.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


class TestRefused:
    def test_with_a_lora(self, tmp_path: Path) -> None:
        model = sdquant.load_model(SD / "unet", "int8", progress=False)
        add_lora(model, rank=2)
        with pytest.raises(sdquant.ConflictError, match="a LoRA is attached to"):
            model.save_pretrained(tmp_path)

    def test_a_pickle(self, tmp_path: Path) -> None:
        model = sdquant.load_model(SD / "unet", "int8", progress=False)
        with pytest.raises(sdquant.SettingsError, match="Leave safe_serialization out"):
            model.save_pretrained(tmp_path, safe_serialization=False)
        assert not list(tmp_path.glob("*.bin"))

    def test_a_library_that_cannot_be_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An old version of diffusers, which has no such quantizers. Copies refuse as well."""
        monkeypatch.setitem(sys.modules, "sdquant.integrations.diffusers_quantizer", None)
        model = sdquant.load_model(SD / "unet", "int8", progress=False)
        for one in (model, copy.deepcopy(model)):
            with pytest.raises(sdquant.SettingsError, match=r"Use sdquant\.save"):
                one.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        sdquant.save(model, tmp_path / "ours")
        same(sdquant.load_model(tmp_path / "ours", progress=False), model)

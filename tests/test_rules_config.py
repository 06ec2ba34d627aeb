"""`sdquant.Config(rules=...)` in diffusers and transformers, and rules of models that were saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel, UNet2DConditionModel
from diffusers.quantizers import PipelineQuantizationConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

import sdquant
from sdquant.backends import QuantSpec, scheme
from sdquant.demo import path
from sdquant.errors import BadFileError, ConflictError, IncompatibleError, SettingsError, UnknownQuantError
from sdquant.nn import packed_of
from sdquant.nn.weights import quantized
from sdquant.rules import PtqProvider, QtProvider, QuantizationRule, quantize_model, rules_of_model
from sdquant.rules.core.static_range import operand
from sdquant.rules.interception import Marked
from sdquant.rules.qconfig import to_dict
from sdquant.rules.quant_spec import first, operation_of
from sdquant.rules.statistics_file import write_statistics

from .test_diffusers_quantizer import same

SD = path("digits-sd")
FLUX = path("digits-flux") / "transformer"
W8A8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")
RULES = (
    QuantizationRule(module_path=".*attn.*", op_names=("linear",), weight_qtype="int4", act_qtype="int8", tile_size=32),
    QuantizationRule(module_path="(context|x)_embedder"),  # stays as it is
    W8A8,
)
STATIC = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
SDPA = QuantizationRule(op_names=("sdpa",), act_qtype="int8")


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def _metadata(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata())


def test_as_json_and_back() -> None:
    config = sdquant.Config(rules=RULES, skip=["proj_out"], quant_stats="ranges.safetensors", component="unet")
    again = sdquant.Config.from_dict(json.loads(config.to_json_string()))
    assert again == config and again.rules == RULES and again.quant == "rules"
    assert again.quant_stats == "ranges.safetensors" and again.component == "unet"
    assert sdquant.Config("rules", rules=[to_dict(row) for row in RULES]).rules == RULES
    assert "ranges" not in sdquant.Config(rules=RULES, quant_stats="ranges.safetensors").saved().to_json_string()
    assert "int4" in repr(config) and repr(sdquant.Config("nf4")) == "Config(quant='nf4', skip=[])"
    assert sdquant.Config() == sdquant.Config("int8")


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"quant": "nf4", "rules": RULES}, SettingsError, "quant='rules'"),
        ({"quant": "rules,weight_qtype=int4", "rules": RULES}, SettingsError, "one rule for all"),
        ({"rules": []}, SettingsError, "not empty"),
        ({"rules": [{"colour": "red"}]}, SettingsError, "colour"),
        ({"quant": "int8", "quant_stats": "x"}, SettingsError, "only rules"),
        ({"component": "unet"}, SettingsError, "only rules"),
        ({"quant": "int9"}, UnknownQuantError, "int9"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sdquant.Config(**values)


def test_diffusers_quantizes_by_rules_saves_and_loads_again(tmp_path: Path) -> None:
    ours = sdquant.load_model(FLUX, rules=RULES, progress=False)
    config = sdquant.Config(rules=RULES)
    model = FluxTransformer2DModel.from_pretrained(FLUX, torch_dtype=torch.bfloat16, quantization_config=config)
    same(model, ours)
    types = {packed.spec.details["weight_qtype"] for _, packed in quantized(model)}
    assert types == {"int4", "int8"} and packed_of(model.x_embedder) is None
    assert rules_of_model(model) == rules_of_model(ours) == list(RULES)
    model.save_pretrained(tmp_path / "theirs")
    sdquant.save(ours, tmp_path / "ours")
    rows = [to_dict(row) for row in RULES]
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        assert _config(folder) == {"quant_method": "sdquant", "quant": "rules", "skip": [], "rules": rows}
        (file,) = folder.glob("*.safetensors")
        own = json.loads(_metadata(file)["sdquant"])
        assert own["rules"] == rows and own["format"] == 1
        again = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
        same(again, ours)
        loaded = sdquant.load_model(folder, progress=False)
        same(loaded, ours)
        assert rules_of_model(again) == rules_of_model(loaded) == list(RULES)


def test_the_pictures_are_those_of_load_model(tmp_path: Path) -> None:
    from sdquant.models.generate import draw

    def picture(pipe: Any) -> bytes:
        drawn: bytes = draw(pipe, ["a photo of the digit 3"], seeds=[1], steps=1)[0].tobytes()
        return drawn

    config = sdquant.Config(rules=[SDPA, W8A8])
    parts = PipelineQuantizationConfig(quant_mapping={"unet": config, "text_encoder": config})
    theirs = DiffusionPipeline.from_pretrained(SD, dtype=torch.bfloat16, quantization_config=parts)
    ours = sdquant.load_model(SD, rules=[SDPA, W8A8], progress=False)
    assert any(isinstance(module, Marked) for module in theirs.unet.modules())
    drawn = picture(ours)
    assert picture(theirs) == drawn
    theirs.save_pretrained(tmp_path / "out")
    again = DiffusionPipeline.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    loaded = sdquant.load_model(tmp_path / "out", progress=False)
    for pipe in (again, loaded):  # products of activations are quantized in what was saved, too
        assert any(isinstance(module, Marked) for module in pipe.unet.modules())
        same(pipe.unet, ours.unet)
        assert rules_of_model(pipe.text_encoder) == [SDPA, W8A8]
    assert picture(again) == drawn


def test_transformers(tmp_path: Path) -> None:
    folder = SD / "text_encoder"
    ours = sdquant.load_model(folder, rules=[W8A8], progress=False)
    model = CLIPTextModel.from_pretrained(folder, quantization_config=sdquant.Config(rules=[W8A8]))
    same(model, ours)
    model.save_pretrained(tmp_path / "out")
    assert _config(tmp_path / "out")["rules"] == [to_dict(W8A8)]
    same(CLIPTextModel.from_pretrained(tmp_path / "out"), ours)
    same(sdquant.load_model(tmp_path / "out", progress=False), ours)


@pytest.fixture(scope="module")
def ranges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ranges of the layers of the UNet and of the text encoder, each with a number of its own."""
    file = tmp_path_factory.mktemp("ranges") / "ranges.safetensors"
    made: dict[str, torch.Tensor] = {}
    pipe = sdquant.load_model(SD, progress=False)
    for component in ("unet", "text_encoder"):
        for name, module in getattr(pipe, component).named_modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
                prefix = f"{component}.{operand(name, operation_of(tuple(module.weight.shape)))}"
                made[f"{prefix}.count"] = torch.tensor(2, dtype=torch.int32)
                made[f"{prefix}.sum_of_absmax"] = torch.full((1,) * module.weight.ndim, 2.0 + len(made))
    write_statistics(file, made, {})
    return file


def test_static_ranges(ranges: Path, tmp_path: Path) -> None:
    ours = sdquant.load_model(SD, rules=[STATIC], quant_stats=ranges, progress=False)
    config = sdquant.Config(rules=[STATIC], quant_stats=ranges)
    unet = UNet2DConditionModel.from_pretrained(SD / "unet", torch_dtype=torch.bfloat16, quantization_config=config)
    same(unet, ours.unet)
    assert all("act_scale" in packed.parts for _, packed in quantized(unet))
    text = sdquant.Config(rules=[STATIC], quant_stats=ranges, component="text_encoder")
    encoder = CLIPTextModel.from_pretrained(SD / "text_encoder", quantization_config=text)
    same(encoder, ours.text_encoder)
    for number, model in enumerate((unet, encoder)):
        model.save_pretrained(tmp_path / str(number))
        assert "quant_stats" not in _config(tmp_path / str(number)) and config.quant_stats == str(ranges)
        same(type(model).from_pretrained(tmp_path / str(number), dtype=torch.bfloat16), model)
    with pytest.raises(SettingsError, match="saw no data"):  # those of the UNet
        CLIPTextModel.from_pretrained(SD / "text_encoder", quantization_config=config)
    with pytest.raises(SettingsError, match="quant_stats is not set"):
        UNet2DConditionModel.from_pretrained(SD / "unet", quantization_config=sdquant.Config(rules=[STATIC]))


def test_rules_that_are_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    nowhere = QuantizationRule(module_path="nowhere", weight_qtype="int8")
    with pytest.raises(IncompatibleError, match="no weight"):
        FluxTransformer2DModel.from_pretrained(FLUX, quantization_config=sdquant.Config(rules=[nowhere]))
    FluxTransformer2DModel.from_pretrained(FLUX, quantization_config=sdquant.Config(rules=[nowhere, W8A8]))
    assert "nowhere" in caplog.text


class TestRulesOfModel:
    """What `rules_of_model` says, and that it is so."""

    def check(self, model: torch.nn.Module) -> list[QuantizationRule]:
        """Quantized by the rules of a model, the float model is that model."""
        rules = rules_of_model(model)
        floats = FluxTransformer2DModel.from_pretrained(FLUX, torch_dtype=torch.bfloat16)
        again = dict(quantized(quantize_model(floats, PtqProvider(rules))))
        mine = dict(quantized(model))
        assert again.keys() == mine.keys()
        for name, packed in mine.items():
            assert all(torch.equal(part.view(torch.uint8), again[name].parts[one].view(torch.uint8))
                       for one, part in packed.parts.items()), name  # fmt: skip
        return rules

    def test_what_was_skipped_is_a_rule_before_them(self) -> None:
        model = sdquant.load_model(FLUX, rules=RULES, skip=["single_transformer_blocks", "proj_out"], progress=False)
        rules = self.check(model)
        assert tuple(rules[-len(RULES) :]) == RULES and len(rules) > len(RULES)
        assert all(row.weight_qtype is None for row in rules[: -len(RULES)])
        assert any(r"single_transformer_blocks\.[^.]+\.proj_mlp" in row.module_path for row in rules)

    def test_without_a_record_the_order_is_found_out(self, tmp_path: Path) -> None:
        sdquant.save(sdquant.load_model(FLUX, rules=RULES, progress=False), tmp_path / "out")
        (file,) = (tmp_path / "out").glob("*.safetensors")
        own = json.loads(_metadata(file)["sdquant"])
        del own["rules"]
        save_file(load_file(file), file, {"sdquant": json.dumps(own)})
        rules = self.check(sdquant.load_model(tmp_path / "out", progress=False))
        assert {row.module_path for row in rules} == {"context_embedder", "x_embedder", RULES[0].module_path, ".*"}

    def test_of_training_and_of_others(self) -> None:
        floats = FluxTransformer2DModel.from_pretrained(FLUX, torch_dtype=torch.bfloat16)
        assert rules_of_model(floats) == []
        assert rules_of_model(quantize_model(floats, QtProvider(RULES))) == list(RULES)
        assert rules_of_model(sdquant.load_model(FLUX, "int8", progress=False)) == []
        one = sdquant.load_model(FLUX, "rules,weight_qtype=int4", progress=False)
        (rule,) = self.check(one)
        assert rule == QuantizationRule(weight_qtype="int4")
        assert first([rule], "proj_out", "linear") is rule and QuantSpec(scheme("rules")).scheme.name == "rules"

    def test_a_record_that_is_none_is_damage(self, tmp_path: Path) -> None:
        sdquant.save(sdquant.load_model(FLUX, rules=RULES, progress=False), tmp_path / "out")
        (file,) = (tmp_path / "out").glob("*.safetensors")
        own, tensors = json.loads(_metadata(file)["sdquant"]), load_file(file)
        damages: list[Any] = ["rules.yml", [], ["int8"], [{"colour": "red"}], [{"module_path": 5}], [{"tile_size": []}]]
        for rules in damages:
            save_file(tensors, file, {"sdquant": json.dumps(own | {"rules": rules})})
            with pytest.raises(BadFileError, match="metadata is damaged"):
                sdquant.detect(tmp_path / "out")

    def test_products_alone(self, tmp_path: Path) -> None:
        pipe = sdquant.load_model(SD, rules=[SDPA], components="unet", progress=False)
        sdquant.save(pipe.unet, tmp_path / "out")
        assert _config(tmp_path / "out")["rules"] == [to_dict(SDPA)]
        theirs = UNet2DConditionModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
        for model in (theirs, sdquant.load_model(tmp_path / "out", progress=False)):
            assert rules_of_model(model) == [SDPA] and any(isinstance(one, Marked) for one in model.modules())
        with pytest.raises(ConflictError, match="portable"):
            sdquant.save(pipe.unet, tmp_path / "other", portable=True)

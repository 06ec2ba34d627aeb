"""Rules that reach nothing in a model never go on unquantized, whatever asks for them; what they reach is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

import sdquant
from sdquant.cli import main
from sdquant.demo import path
from sdquant.errors import IncompatibleError, SettingsError
from sdquant.rules import PtqProvider, QtProvider, QuantizationRule, quantize_model
from sdquant.rules.interception import UnusedRuleWarning
from sdquant.rules.presets import Choices, preset_rules
from sdquant.rules.qconfig import to_dict

FLUX = path("digits-flux")
NETWORK = FLUX / "transformer"
SLIP = "transformer_blocks"  # a part of many paths, and the whole of none that multiplies
PRODUCTS = QuantizationRule(module_path="nowhere", op_names=("einsum",), act_qtype="int8")


def _slip(preset: str) -> tuple[QuantizationRule, ...]:
    return preset_rules(preset, Choices(module_path=SLIP))


def _load(rules: Any) -> Any:
    return sdquant.load_model(NETWORK, rules=rules, progress=False)


def _quantize(rules: Any) -> Any:
    return sdquant.quantize(_empty(), rules=rules, progress=False)


def _diffusers(rules: Any) -> Any:
    return FluxTransformer2DModel.from_pretrained(NETWORK, quantization_config=sdquant.Config(rules=rules))


def _empty() -> nn.Module:
    with torch.device("meta"):
        return FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(NETWORK))


WAYS = (lambda rules: sdquant.plan(FLUX, rules=rules), _load, _quantize, _diffusers)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rules", [_slip("int8"), (PRODUCTS,)], ids=["preset", "products"])
def test_rules_that_match_nothing_are_refused(
    way: Callable[[Any], Any], rules: tuple[QuantizationRule, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(IncompatibleError, match="no weight that would be quantized") as caught:
        way(rules)
    if rules[0] is not PRODUCTS:
        assert f"'.*{SLIP}.*'" in caught.value.fix  # which does match


@pytest.mark.parametrize("preset", ["int8", "fp8_full", "w4a8"])
def test_commands_end_with_2_and_write_nothing(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "four.yml"
    words = {"pretrained_model_name_or_path": "digits-flux", "output_dir": str(tmp_path / "out"), "prompt": "a 7",
             "use_qwix_quantization": True, "quantization": preset, "qwix_module_path": SLIP}  # fmt: skip
    config.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in words.items()))
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps([to_dict(row) for row in _slip(preset)]))
    assert main(["generate", str(config)]) == 2
    assert main(["quantize", "digits-flux", str(tmp_path / "model"), "--rules", str(rules)]) == 2
    assert main(["plan", "digits-flux", "--rules", str(rules)]) == 2
    assert capsys.readouterr().err.count(f"'.*{SLIP}.*'") == 3
    assert sorted(tmp_path.iterdir()) == [config, rules]


def test_a_component_that_was_named_is_not_passed_over() -> None:
    rule = QuantizationRule(module_path="encoder.*", weight_qtype="int8")
    made = sdquant.plan(FLUX, rules=[rule])
    assert {part.name for part in made.components if part.weights} == {"text_encoder", "text_encoder_2"}
    assert any("Nothing in transformer would be quantized" in line for line in made.warnings)
    with pytest.raises(IncompatibleError, match="Cannot quantize transformer of"):
        sdquant.plan(FLUX, rules=[rule], components=["transformer", "text_encoder"])
    with pytest.raises(IncompatibleError, match=r"Cannot quantize text_encoder of .*skipped as asked"):
        sdquant.plan(FLUX, {"transformer": "int8", "text_encoder": "int8"}, skip="encoder")
    skipped = sdquant.plan(FLUX, "int8", skip="encoder")
    assert sum("Nothing in text_encoder" in line for line in skipped.warnings) == 2


def test_products_are_counted_in_the_model_and_a_rule_that_matches_none_is_named() -> None:
    sdpa = QuantizationRule(op_names=("sdpa",), act_qtype="int8")
    made = sdquant.plan(NETWORK, rules=[sdpa, PRODUCTS])
    (part,) = made.components
    assert not part.weights and part.products
    assert part.to_dict()["quantized_products"] == part.products
    assert [line for line in made.warnings if "nowhere" in line] and not any("sdpa" in one for one in made.warnings)


def test_modules_that_match_and_multiply_nothing_end_the_first_run() -> None:
    block = QuantizationRule(module_path="1", op_names=("matmul",), act_qtype="int8")
    model = nn.Sequential(nn.Linear(4, 4), _Adds())
    with pytest.warns(UnusedRuleWarning, match="none of the 1 modules"):  # something else is quantized
        quantize_model(model, PtqProvider([block, QuantizationRule(weight_qtype="int8")]))(torch.ones(2, 4))
    made = quantize_model(model, PtqProvider([block]))
    for _ in range(2):
        with pytest.raises(IncompatibleError, match="none of its weights is quantized, and none of the 1 modules"):
            made(torch.ones(2, 4))


class _Adds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_a_preset_for_linear_layers_says_nothing_of_products(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Linear(4, 4), _Adds())
    for module_path in ("0", ".*"):
        quantize_model(model, PtqProvider(preset_rules("int8", Choices(module_path=module_path))))(torch.ones(2, 4))
    assert not [one for one in recwarn if issubclass(one.category, UnusedRuleWarning)]


@pytest.mark.parametrize("provider", [PtqProvider, QtProvider])
def test_no_rules_give_the_float_model(provider: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    made = quantize_model(model, provider([]))
    x = torch.ones(2, 4)
    assert made is not model and torch.equal(made(x), model(x))


UNEVEN = preset_rules("int8", Choices(act_method="minmax"))


@pytest.mark.parametrize("way", WAYS)
def test_what_products_cannot_follow_is_refused_before_weights_are_read(
    way: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("sdquant.loading.loader.fill", read)
    monkeypatch.setattr("sdquant.loading.quantizer.quantize_module", read)
    with pytest.raises(SettingsError, match="gives both operands a zero point"):
        way(UNEVEN)
    linear = preset_rules("int8", Choices(act_method="minmax", module_path=".*to_q"))
    assert sdquant.plan(NETWORK, rules=linear).components[0].weights  # of modules that multiply no activations

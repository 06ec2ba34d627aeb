"""Ranges of activations over prompts: found, resumed, used; the digits are drawn with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import sdquant
from sdquant.cli import main
from sdquant.demo import path
from sdquant.errors import SettingsError
from sdquant.rules import QuantizationRule
from sdquant.rules.statistics_file import write_statistics
from sdquant.training import digits
from sdquant.training.calibration import Calibration, calibrate
from sdquant.training.partial_statistics import PartialStatistics

from .test_distributed import torchrun

STATIC = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)
DYNAMIC = QuantizationRule(weight_qtype="int8", act_qtype="int8")
PROMPTS = tuple(digits.prompt(digit) for digit in (3, 7))


def _task(**values: Any) -> Calibration:
    given: dict[str, Any] = {"model": "digits-sd", "rules": (STATIC,), "prompts": PROMPTS, "steps": 2}
    given["components"] = ("unet",)
    return Calibration(**{**given, **values})


def _float(name: str = "digits-sd") -> Any:
    return sdquant.load_model(path(name), progress=False)


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def ranges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the whole pipeline, two prompts."""
    file = tmp_path_factory.mktemp("ranges") / "stats.safetensors"
    write_statistics(file, calibrate(_float(), _task(components=())), {})
    return file


def test_every_quantized_layer_has_a_range(ranges: Path) -> None:
    found = load_file(ranges)
    plan = sdquant.plan(path("digits-sd"), rules=[STATIC], quant_stats=ranges)
    wanted = {f"{part.name}.{row.name.removesuffix('.weight')}" for part in plan.components for row in part.weights}
    assert wanted and {name.rpartition(".")[0].rpartition(".")[0] for name in found} == wanted
    assert {int(value) for name, value in found.items() if name.endswith(".count") and name.startswith("unet.")} <= {
        4,
        5,
    }


def test_every_image_begins_with_a_noise_of_its_own() -> None:
    """With one noise for all prompts, layers see so few directions that GPTQ fits codes to these alone."""
    images = _task(count=2, seed=5).images
    assert images == ((PROMPTS[0], 5), (PROMPTS[1], 6), (PROMPTS[0], 7), (PROMPTS[1], 8))


def test_static_ranges_draw_nearly_what_dynamic_ones_draw(ranges: Path) -> None:
    import numpy as np

    from sdquant.models.generate import draw

    drawn = {}
    for name, values in {"float": {}, "dynamic": {"rules": [DYNAMIC]},
                         "static": {"rules": [STATIC], "quant_stats": ranges}}.items():  # fmt: skip
        pipe = sdquant.load_model(path("digits-sd"), progress=False, **values)
        drawn[name] = np.asarray(draw(pipe, [PROMPTS[0]], seeds=[0], steps=2)[0], np.float64)
    assert not np.array_equal(drawn["static"], drawn["dynamic"])
    one, other = (np.abs(drawn[name] - drawn["float"]).mean() for name in ("static", "dynamic"))
    assert one < 4 * other + 2


def test_saved_with_its_ranges(ranges: Path, tmp_path: Path) -> None:
    from sdquant.models.pipelines import weight_parts

    pipe = sdquant.load_model(path("digits-sd"), rules=[STATIC], quant_stats=ranges, progress=False)
    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", progress=False)
    for name, part in weight_parts(pipe).items():
        state, other = part.state_dict(), weight_parts(again)[name].state_dict()
        assert state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)
    assert any(key.endswith("packed_act_scale") for key in weight_parts(again)["unet"].state_dict())


def test_stopped_and_gone_on_with_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = calibrate(_float(), _task())
    partial = tmp_path / "stats.partial"
    kept = PartialStatistics.write

    def stop_after(*values: Any) -> None:
        kept(*values)
        raise KeyboardInterrupt

    monkeypatch.setattr(PartialStatistics, "write", stop_after)
    with pytest.raises(KeyboardInterrupt):
        calibrate(_float(), _task(), partial=partial)
    monkeypatch.setattr(PartialStatistics, "write", kept)
    with pytest.raises(SettingsError, match="steps differ"):
        calibrate(_float(), _task(steps=3), partial=partial)
    with safe_open(partial, "pt") as file:
        assert json.loads(file.metadata()["sdquant_quant_stats"])["done"] == 1
    assert _equal(calibrate(_float(), _task(), partial=partial), whole)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rules": (DYNAMIC,)}, "act_static_scale"),
        ({"prompts": ()}, "no prompts"),
        ({"components": ("vae",), "rules": (dataclasses.replace(STATIC, module_path="none"),)}, "first to match"),
    ],
)  # fmt: skip
def test_what_cannot_be_calibrated_is_said(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        calibrate(_float(), _task(**values))


def test_a_layer_that_no_prompt_reaches_is_named() -> None:
    pipe = _float()
    pipe.unet.unused = torch.nn.Linear(8, 8)
    with pytest.raises(SettingsError, match=r"unet\.unused"):
        calibrate(pipe, _task())


def test_ranges_are_asked_for_before_weights_are_read(ranges: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="quant_stats is not set"):
        sdquant.plan(path("digits-sd"), rules=[STATIC])
    lone = tmp_path / "unet.safetensors"
    write_statistics(lone, {k: v for k, v in load_file(ranges).items() if k.startswith("unet.")}, {})
    with pytest.raises(SettingsError, match=r"not initialized for .*mlp\.fc1"):
        sdquant.plan(path("digits-sd"), rules=[STATIC], quant_stats=lone)
    assert sdquant.plan(path("digits-sd") / "unet", rules=[STATIC], quant_stats=lone).components[0].weights
    # Files of transformers 4 call these layers otherwise.
    older = {k.replace(".encoder.layers", ".text_model.encoder.layers"): v for k, v in load_file(ranges).items()}
    write_statistics(lone, older, {})
    assert sdquant.plan(path("digits-sd"), rules=[STATIC], quant_stats=lone).components[0].weights
    other = QuantizationRule(
        weight_qtype="int8", act_qtype="int8", act_static_scale=True, act_calibration_method="minmax"
    )
    with pytest.raises(SettingsError, match="min"):
        sdquant.plan(path("digits-sd"), rules=[other], quant_stats=ranges)
    tiled = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True, tile_size=32)
    with pytest.raises(SettingsError, match="tiles"):
        sdquant.plan(path("digits-sd"), rules=[tiled], quant_stats=ranges, components="unet")
    with pytest.raises(SettingsError, match="only rules"):
        sdquant.plan(path("digits-sd"), "nf4", quant_stats=ranges)


def test_a_loaded_model_is_left_alone_where_ranges_are_missing(ranges: Path, tmp_path: Path) -> None:
    from sdquant.nn import QuantizedLayer

    some = tmp_path / "some.safetensors"
    write_statistics(some, {k: v for k, v in load_file(ranges).items() if "up_blocks" not in k}, {})
    for statistics in (None, some):
        pipe = _float()
        with pytest.raises(SettingsError, match=r"static|Static"):
            sdquant.quantize(pipe, rules=[STATIC], quant_stats=statistics, progress=False)
        assert not any(isinstance(module, QuantizedLayer) for module in pipe.unet.modules())
        assert not any(isinstance(module, QuantizedLayer) for module in pipe.text_encoder.modules())


def test_the_command_writes_a_file_that_generate_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules, out = tmp_path / "rules.yml", tmp_path / "stats.safetensors"
    rules.write_text(
        "- module_path: .*attentions.*\n  weight_qtype: int8\n  act_qtype: int8\n  act_static_scale: true\n"
        "- weight_qtype: int8\n"
    )
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n\n")
    words = ["calibrate", "digits-sd", "--rules", str(rules), "--prompts", str(prompts), "--steps", "2", "-o", str(out)]
    assert main([*words, "--components", "unet", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["images"] == 2 and said["components"] == ["unet"] and said["layers"] > 10
    assert [file.name for file in tmp_path.iterdir() if "partial" in file.name] == []
    assert main(words) == 2 and "exists" in capsys.readouterr().err
    image = tmp_path / "seven.png"
    drawing = ["generate", "digits-sd", PROMPTS[1], "--rules", str(rules), "--quant-stats", str(out), "--steps", "2"]
    assert main([*drawing, "--components", "unet", "-o", str(image)]) == 0 and image.stat().st_size > 100


def test_a_preset_and_a_config_have_ranges_without_rules_being_written_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "seven.yml"
    config.write_text(
        "pretrained_model_name_or_path: digits-sd\nuse_qwix_quantization: true\nquantization: int8\n"
        f"qwix_module_path: .*attn[12].*\nnum_inference_steps: 1\nprompt: {PROMPTS[0]}\noutput_dir: {tmp_path}\n"
    )
    words = ["calibrate", "digits-sd", "--prompt", PROMPTS[0], "--steps", "1", "--components", "unet", "-o"]
    whole, part = tmp_path / "whole.safetensors", tmp_path / "part.safetensors"
    assert main([*words, str(whole), "--preset", "int8"]) == 0
    assert main([*words, str(part), "--config", str(config)]) == 0
    assert f"sdquant generate {config} quant_stats={part}" in capsys.readouterr().out
    ranges, some = load_file(whole), load_file(part)
    assert some.keys() < ranges.keys() and all(".attn" in name for name in some)
    assert any(".einsum0_lhs." in name for name in some) and any(".dot_general0_lhs." in name for name in some)
    assert main(["generate", str(config), f"quant_stats={part}", "components=['unet']"]) == 0
    for wrong, said in (
        (["--preset", "int8_wo"], "no rule has act_static_scale"),
        (["--preset", "int8", "--config", str(config)], "--preset and --config cannot be combined"),
    ):  # fmt: skip
        assert main([*words, str(tmp_path / "none.safetensors"), *wrong]) == 2
        assert said in capsys.readouterr().err


def test_what_products_cannot_follow_is_refused_before_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("sdquant.loading.loader.fill", read)
    rules = tmp_path / "rules.yml"
    rules.write_text("- {op_names: [sdpa], act_qtype: int8, act_calibration_method: minmax, act_static_scale: true}\n")
    out = tmp_path / "ranges.safetensors"
    assert main(["calibrate", "digits-sd", "--rules", str(rules), "--prompt", "a", "-o", str(out)]) == 2
    assert "gives both operands a zero point" in capsys.readouterr().err


@pytest.mark.slow  # tests/test_distributed.py has the ranges of two processes in the default run
@pytest.mark.parametrize("count", [2, 4])
def test_shared_out_over_processes_gives_the_same_file(tmp_path: Path, count: int) -> None:
    """Three images: with four processes one of them sees none."""
    rules = tmp_path / "rules.yml"
    products = '- {module_path: ".*attn[12]", op_names: [sdpa], act_qtype: int8, act_static_scale: true}\n'
    rules.write_text(products + "- {weight_qtype: int8, act_qtype: int8, act_static_scale: true}\n")
    one, several = tmp_path / "one.safetensors", tmp_path / "several.safetensors"
    words = ["calibrate", "digits-sd", "--rules", str(rules), "--steps", "1", "--components", "unet"]
    words += [word for digit in (1, 4, 9) for word in ("--prompt", digits.prompt(digit))]
    assert main([*words, "-o", str(one)]) == 0
    done = torchrun(count, *words, "-o", several, module=True)
    assert done.returncode == 0, done.stderr
    assert several.read_bytes() == one.read_bytes()
    assert any(".attn2.einsum1_rhs." in name for name in load_file(one))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.safetensors", "rules.yml", "several.safetensors"]

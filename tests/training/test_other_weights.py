"""Statistics of other weights are refused in one place, which every path to quantized weights passes once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sdquant
from sdquant.demo import path
from sdquant.errors import SettingsError
from sdquant.planning import statistics_arguments
from sdquant.rules import QuantizationRule, statistics_file, weight_samples
from sdquant.saving import comfy_mix, export_single_file, quantize_file
from sdquant.training import digits
from sdquant.training.calibration import Calibration, calibrate

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Short

STATIC = {"module_path": ".*attn[12].*", "weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": True}


def _statistics(file: Path, rules: tuple[QuantizationRule, ...], components: tuple[str, ...]) -> Path:
    task = Calibration(
        model="digits-sd", rules=rules, prompts=(digits.prompt(3),), steps=1, gradients=1, components=components
    )
    found = calibrate(sdquant.load_model(path("digits-sd"), progress=False), task)
    statistics_file.write_statistics(file, found, {})
    return file


@pytest.fixture(scope="module")
def ranges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of activations, in the layers that a training quantizes."""
    folder = tmp_path_factory.mktemp("ranges")
    return _statistics(folder / "stats.safetensors", (QuantizationRule(**STATIC),), ("unet",))


@pytest.fixture(scope="module")
def quality(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What quality can use, of the UNet and the text encoder."""
    return _statistics(tmp_path_factory.mktemp("quality") / "stats.safetensors", (), ())


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the weights of each component are compared with those of a file."""
    counts: Counter[str] = Counter()
    compare = weight_samples.refuse_other_weights

    def counted(file: str, component: str, names: Any, read: Callable[[str], Any]) -> tuple[str, ...]:
        counts[component] += 1
        return compare(file, component, names, read)

    monkeypatch.setattr(statistics_arguments.weight_samples, "refuse_other_weights", counted)
    return counts


def test_a_training_refuses_them(short: Short, ranges: Path, others: Path, looks: Counter[str], tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "use_qwix_quantization": True, "rules": [STATIC], "quant_stats": str(ranges),
        "max_train_steps": 1,
    }  # fmt: skip
    with pytest.raises(SettingsError, match="calibrated with other weights"):
        short(run_name="others", pretrained_model_name_or_path=str(others), **values)
    assert looks["unet"] == 1 and not (tmp_path / "others" / "model").exists()
    short(run_name="own", **values)
    assert looks["unet"] == 2 and (tmp_path / "own" / "model").is_dir()


@pytest.mark.parametrize("quant", ["int4,gptq", "auto"])
def test_plans_and_models_in_memory_are_compared_once(quant: str, quality: Path, looks: Counter[str]) -> None:
    size = {"size": "2.5MB"} if quant == "auto" else {}
    sdquant.plan(path("digits-sd"), quant, quant_stats=quality, **size)
    assert looks == {"text_encoder": 1, "unet": 1}
    pipe = sdquant.load_model(path("digits-sd"), progress=False)
    sdquant.quantize(pipe, quant, quant_stats=quality, progress=False, **size)
    assert looks == {"text_encoder": 2, "unet": 2}


@pytest.mark.parametrize("quant", ["q4_k,gptq", "auto"])
def test_gguf_files_are_compared_once(quant: str, quality: Path, looks: Counter[str], tmp_path: Path) -> None:
    values: dict[str, Any] = {"size": "1MB"} if quant == "auto" else {}
    quantize_file(path("digits-sd"), quant, tmp_path / "x.gguf", quant_stats=quality, progress=False, **values)
    assert looks == {"unet": 1}


def test_files_of_comfyui_are_compared_once(quality: Path, looks: Counter[str], tmp_path: Path) -> None:
    values: dict[str, Any] = {"quant_stats": quality, "progress": False}
    model = path("digits-sd")
    export_single_file.quantize_file(model, "comfy:nvfp4,gptq", tmp_path / "a.safetensors", **values)
    comfy_mix.write_comfy_mix(model, "auto", tmp_path / "b.safetensors", size="2MB", **values)
    assert looks == {"unet": 2}

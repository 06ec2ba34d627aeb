"""Layers that transformers and diffusers keep in floats stay floats in the schemes of bitsandbytes and SDNQ, unless
asked for."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sdquant
from sdquant import backends
from sdquant.models import keep_in_fp32
from sdquant.models.components import quiet
from sdquant.models.pipelines import weight_parts
from sdquant.nn.weights import quantized

SCHEMES = ["nf4", "fp4", "bnb-int8"]


def names(pipelines: Path) -> set[str]:
    """What diffusers' pipelines import from transformers."""
    found: set[str] = set()
    for file in pipelines.rglob("*.py"):
        for words in re.findall(r"from transformers import (\([^)]*\)|[^\n]*)", file.read_text()):
            found |= set(re.findall(r"\b[A-Z]\w+", words))
    return found


def test_the_table_is_what_the_classes_say() -> None:
    """Of every model of diffusers, and every text encoder of its pipelines."""
    import diffusers
    import transformers

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of classes that are looked at
        theirs = [getattr(diffusers, name, None) for name in dir(diffusers)]
        used = names(Path(diffusers.__file__).parent / "pipelines")
        used |= {name for name in dir(transformers) if name.startswith(("T5", "MT5", "UMT5"))}
        theirs += [getattr(transformers, name, None) for name in sorted(used)]
        bases = (diffusers.ModelMixin, transformers.PreTrainedModel)
    classes = {cls for cls in theirs if isinstance(cls, type) and issubclass(cls, bases)}
    said = {cls.__name__: set(getattr(cls, "_keep_in_fp32_modules", None) or ()) for cls in classes}
    assert {name: set(keep_in_fp32.of_class(name)) for name in said} == said
    assert said["T5EncoderModel"] == said["UMT5EncoderModel"] == {"wo"} and "WanTransformer3DModel" in said


@pytest.mark.parametrize("scheme", ["nf4", "bnb-int8"])
@pytest.mark.parametrize("component", ["text_encoder", "text_encoder_2"])
def test_the_layers_that_transformers_chooses(component: str, scheme: str, flux: Path) -> None:
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig, CLIPTextModel, T5EncoderModel

    theirs: Any = BitsAndBytesConfig(load_in_4bit=scheme == "nf4", load_in_8bit=scheme == "bnb-int8")
    cls: Any = T5EncoderModel if component == "text_encoder_2" else CLIPTextModel
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        model = cls.from_pretrained(flux / component, quantization_config=theirs, dtype=torch.bfloat16)
    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    chosen = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, kinds)}
    for runtime in ("library", "plain"):
        (part,) = sdquant.plan(flux / component, scheme, runtime=runtime).components
        assert {weight.name for weight in part.weights} == chosen
        ours = sdquant.load_model(flux / component, scheme, runtime=runtime, progress=False)
        assert set(dict(quantized(ours))) == chosen


def test_the_layers_that_diffusers_chooses(tmp_path: Path) -> None:
    import bitsandbytes as bnb
    from diffusers import BitsAndBytesConfig, WanTransformer3DModel
    from diffusers.quantizers.bitsandbytes.utils import replace_with_bnb_linear

    with quiet():
        model: Any = WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=64, freq_dim=64,
            ffn_dim=128, num_layers=1,
        )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    (part,) = sdquant.plan(tmp_path, "nf4").components
    replace_with_bnb_linear(
        model,
        modules_to_not_convert=[*model._keep_in_fp32_modules],
        quantization_config=BitsAndBytesConfig(load_in_4bit=True),
    )
    chosen = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)}
    assert {weight.name for weight in part.weights} == chosen
    assert "condition_embedder.time_embedder.linear_1.weight" in part.kept


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_plan_says_why_and_the_option_quantizes_them(scheme: str, flux: Path) -> None:
    (part,) = sdquant.plan(flux / "text_encoder_2", scheme).components
    assert {name.split(".")[-2] for name in part.kept} == {"wo"}
    assert all(f"{scheme},wo" in reason for reason in part.kept.values())
    (whole,) = sdquant.plan(flux / "text_encoder_2", f"{scheme},wo").components
    assert {weight.name for weight in whole.weights} == {weight.name for weight in part.weights} | set(part.kept)
    assert whole.bytes < part.bytes and not whole.kept


def test_the_option_is_for_schemes_that_the_libraries_have() -> None:
    theirs = {row.name for row in backends.schemes() if row.backend == "sdnq" and row.on_the_fly}
    assert {row.name for row in backends.schemes() if keep_in_fp32.OPTION in row.options} == {*SCHEMES, *theirs}
    with pytest.raises(sdquant.SettingsError, match="wo"):
        sdquant.check("int8,wo", "none")


def test_nothing_else_keeps_them(flux: Path) -> None:
    for scheme in ("int8", "qint4", "fp8"):
        (part,) = sdquant.plan(flux / "text_encoder_2", scheme).components
        assert not part.kept


@pytest.mark.parametrize("mode", ["pre", "post"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_of_them_are_read(scheme: str, mode: str, flux: Path, tmp_path: Path) -> None:
    """As every folder has them that was saved before they were kept."""
    model = sdquant.load_model(flux / "text_encoder_2", f"{scheme},wo", mode=mode, progress=False)
    sdquant.save(model, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", progress=False)
    assert set(dict(quantized(again))) == set(dict(quantized(model)))
    assert sum(name.endswith("wo.weight") for name in dict(quantized(again))) == 2
    words = torch.arange(12)[None] % model.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(again(words).last_hidden_state, model(words).last_hidden_state)


def test_after_loading_the_same_layers(flux: Path) -> None:
    pipe = sdquant.quantize(sdquant.load_model(flux, progress=False), "nf4", progress=False)
    planned = {part.name: part for part in sdquant.plan(flux, "nf4").components}
    for name, module in weight_parts(pipe).items():
        assert set(dict(quantized(module))) == {weight.name for weight in planned[name].weights}


def test_config_for_transformers_keeps_them(flux: Path) -> None:
    from transformers import T5EncoderModel

    def wo(quant: str) -> bool:
        model: nn.Module = T5EncoderModel.from_pretrained(
            flux / "text_encoder_2", dtype=torch.bfloat16, quantization_config=sdquant.Config(quant)
        )
        return any(name.endswith("wo.weight") for name in dict(quantized(model)))

    assert not wo("nf4") and wo("nf4,wo")

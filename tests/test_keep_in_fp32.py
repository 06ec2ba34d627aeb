"""What transformers and diffusers keep in float32 is kept so: the parameters' dtypes are their `from_pretrained`'s.

T5's `wo` in float16 is why: what it multiplies by passes 65504, T5 clamps it, and the text is wrong without an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sdquant
from sdquant import cli
from sdquant.models import keep_in_fp32
from sdquant.models.components import quiet
from sdquant.models.keep_in_fp32 import float32_of_class, float32_of_model
from sdquant.nn import packed_of
from sdquant.nn.weights import quantized

from . import image_models, video_models

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, in float32, with a `wo` whose products do not fit into float16."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=99, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    model = T5EncoderModel(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".wo.weight"):
            parameter.data *= 1e5
    folder = tmp_path_factory.mktemp("t5")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def halved(t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with every tensor in float16, as all folders of Stable Diffusion 3 have it."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("halved")
    for file in t5.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "model.safetensors"
    save_file({key: one.half() for key, one in load_file(weights).items()}, weights, {"format": "pt"})
    return folder


WORDS = torch.arange(24).view(2, 12)


def text(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(WORDS).last_hidden_state
    return found.double()


def snr(found: Tensor, wanted: Tensor) -> float:
    """In decibels."""
    return float(10 * torch.log10(wanted.square().mean() / (found - wanted).square().mean()))


def theirs(folder: Path, cls: str = "T5EncoderModel", **values: Any) -> Any:
    import transformers

    with quiet():
        return getattr(transformers, cls).from_pretrained(folder, **values).eval()


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", ["float16", None])
def test_t5_in_float16(dtype: str | None, t5: Path, halved: Path) -> None:
    folder = t5 if dtype else halved
    wanted, model = text(theirs(folder, dtype=torch.float32)), sdquant.load_model(folder, dtype=dtype, progress=False)
    library = theirs(folder, dtype=torch.float16)
    assert dtypes(model) == dtypes(library)
    assert (
        snr(text(model), wanted) == pytest.approx(snr(text(library), wanted), abs=1) and snr(text(model), wanted) > 50
    )
    assert sdquant.plan(folder, dtype=dtype).bytes == sum(p.nbytes for p in library.parameters())


# Of weights alone, in decibels: what a scheme's own rounding leaves, with the two layers that it goes through.
@pytest.mark.parametrize(
    ("quant", "runtime"),
    [
        ("int8", None),
        ("bnb-int8,wo", "library"),
        ("nf4", "library"),
        ("nf4,wo", "plain"),
        ("qint8", "library"),
        ("sdnq-int8", None),
    ],
)
@pytest.mark.parametrize("mode", ["pre", "post"])
def test_quantized_it_is_as_right_as_in_float32(
    mode: str, quant: str, runtime: str | None, halved: Path, tmp_path: Path
) -> None:
    wanted = text(theirs(halved, dtype=torch.float32))
    how: dict[str, Any] = {"mode": mode, "runtime": runtime, "progress": False}
    whole = snr(text(sdquant.load_model(halved, quant, dtype="float32", **how)), wanted)
    model = sdquant.load_model(halved, quant, **how)
    assert snr(text(model), wanted) > whole - 1.5
    sdquant.save(model, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", runtime=runtime, progress=False)
    assert torch.equal(text(again), text(model)) and dtypes(again) == dtypes(model)
    named = sdquant.load_model(tmp_path / "saved", runtime=runtime, dtype="float16", progress=False)
    assert torch.equal(text(named), text(model))


def test_a_loaded_model_is_quantized_as_right(halved: Path) -> None:
    wanted = text(theirs(halved, dtype=torch.float32))
    model = sdquant.quantize(sdquant.load_model(halved, progress=False), "int8", progress=False)
    assert snr(text(model), wanted) > 30


@pytest.mark.parametrize("quant", ["int8", "nf4"])
def test_through_transformers(quant: str, halved: Path, tmp_path: Path) -> None:
    wanted = text(theirs(halved, dtype=torch.float32))
    model = theirs(halved, dtype=torch.float16, quantization_config=sdquant.Config(quant))
    ours = sdquant.load_model(halved, quant, runtime="plain", progress=False)
    assert torch.equal(text(model), text(ours)) and snr(text(model), wanted) > 10
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(text(theirs(tmp_path / "saved", dtype=torch.float16)), text(model))


@pytest.mark.parametrize("quant", [None, "int8", "qint8", "nf4", "nf4,wo", "sdnq-uint4"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_plan_counts_it(dtype: str, quant: str | None, t5: Path) -> None:
    (part,) = sdquant.plan(t5, quant, dtype=dtype, runtime="plain").components
    model = sdquant.load_model(t5, quant, dtype=dtype, runtime="plain", progress=False)
    held = {name: packed.nbytes for name, packed in quantized(model)}
    assert {weight.name: weight.bytes for weight in part.weights} == held
    assert part.bytes == sum(p.nbytes for p in model.parameters())


def wan() -> tuple[str, dict[str, Any]]:
    return "WanTransformer3DModel", {
        "num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "text_dim": 64,
        "freq_dim": 64, "ffn_dim": 128, "num_layers": 1,
    }  # fmt: skip


def run_wan(model: Any) -> Tensor:
    dtype = model.patch_embedding.bias.dtype
    generator = torch.Generator().manual_seed(0)
    latents, words = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((1, model.config.in_channels, 2, 8, 8), (1, 5, 64))
    )
    with torch.no_grad():
        found: Tensor = model(latents, torch.tensor([500]), words).sample
    return found.double()


@pytest.mark.parametrize("dtype", HALVES)
def test_wan(dtype: torch.dtype, tmp_path: Path) -> None:
    import diffusers

    name, values = wan()
    torch.manual_seed(0)
    with quiet():
        model = getattr(diffusers, name)(**values).to(dtype)
        model.save_pretrained(tmp_path / "wan")
        library = getattr(diffusers, name).from_pretrained(tmp_path / "wan", torch_dtype=dtype)
    for asked in (None, str(dtype).removeprefix("torch.")):
        ours = sdquant.load_model(tmp_path / "wan", dtype=asked, progress=False)
        assert dtypes(ours) == dtypes(library)
        assert torch.equal(run_wan(ours), run_wan(library))
    for quant, runtime in (("int8", None), ("qint8", "plain"), ("nf4", "library"), ("sdnq-int8", None)):
        ours = sdquant.load_model(tmp_path / "wan", quant, runtime=runtime, progress=False)
        assert snr(run_wan(ours), run_wan(library)) > (12 if quant == "nf4" else 25)
        layer = ours.condition_embedder.time_embedder.linear_1
        assert (layer.compute_dtype if packed_of(layer) else layer.weight.dtype) == torch.float32
        sdquant.save(ours, tmp_path / f"wan-{quant}")
        again = sdquant.load_model(tmp_path / f"wan-{quant}", runtime=runtime, progress=False)
        assert torch.equal(run_wan(again), run_wan(ours))


def test_a_conversion_does_not_round_it(tmp_path: Path) -> None:
    import diffusers

    name, values = wan()
    torch.manual_seed(0)
    with quiet():
        getattr(diffusers, name)(**values).save_pretrained(tmp_path / "wan")
    first = sdquant.load_model(tmp_path / "wan", "nf4", dtype="bfloat16", progress=False)
    sdquant.save(first, tmp_path / "first")
    words = ["quantize", tmp_path / "first", tmp_path / "second", "-q", "int8", "--dtype", "bfloat16", "--no-progress"]
    assert cli.main([*map(str, words)]) == 0
    second = dict(sdquant.load_model(tmp_path / "second", progress=False).named_parameters())
    kept = {key: one for key, one in first.named_parameters() if one.dtype == torch.float32 and key in second}
    assert any(not torch.equal(one, one.bfloat16().float()) for one in kept.values())
    assert all(torch.equal(second[key], one) for key, one in kept.items() if "packed" not in key)


def _class(row: Any) -> str:
    name: str = row.kind if isinstance(row, image_models.Row) else row.class_name
    return name


def shapes_of_diffusers() -> Iterator[Any]:
    """The tiny models of all families; in CI those of which diffusers keeps something in float32."""
    for name, row in {**video_models.MODELS, **image_models.MODELS}.items():
        kept = bool(keep_in_fp32.of_class(_class(row)))
        yield pytest.param(row, id=name, marks=() if kept else pytest.mark.slow)


@pytest.mark.parametrize("row", [*shapes_of_diffusers()])
def test_dtypes_of_diffusers(row: Any, tmp_path: Path) -> None:
    import diffusers

    cls: Any = getattr(diffusers, _class(row))
    for dtype in HALVES:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of small sizes
            cls(**row.config).to(dtype).save_pretrained(tmp_path / "model")
            library = cls.from_pretrained(tmp_path / "model", torch_dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        for asked in (name, None):
            ours = sdquant.load_model(tmp_path / "model", dtype=asked, progress=False)
            assert dtypes(ours) == dtypes(library)
            assert sdquant.plan(tmp_path / "model", dtype=asked).bytes == sum(
                one.nbytes for one in library.state_dict().values()
            )
        assert float32_of_model(library) == float32_of_class(_class(row))


def tiny_of_transformers() -> dict[str, tuple[str, dict[str, Any]]]:
    """Encoders of diffusers' pipelines: class, config class and values."""
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = {**size, "vocab_size": 99, "max_position_embeddings": 32, "pad_token_id": 0}
    heads = {**words, "num_key_value_heads": 2, "head_dim": 16}
    t5 = {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    return {
        "T5EncoderModel": ("T5Config", t5),
        "UMT5EncoderModel": ("UMT5Config", t5),
        "CLIPTextModelWithProjection": ("CLIPTextConfig", {**words, "projection_dim": 16}),
        "CLIPVisionModelWithProjection": ("CLIPVisionConfig", {**size, "image_size": 16, "patch_size": 8}),
        "SiglipVisionModel": ("SiglipVisionConfig", {**size, "image_size": 16, "patch_size": 8}),
        "LlamaModel": ("LlamaConfig", heads),
        "Qwen3ForCausalLM": ("Qwen3Config", heads),
        "Gemma2Model": ("Gemma2Config", heads),
        "BertModel": ("BertConfig", words),
    }


@pytest.mark.parametrize("name", tiny_of_transformers())
def test_dtypes_of_transformers(name: str, tmp_path: Path) -> None:
    import transformers

    config, values = tiny_of_transformers()[name]
    model: Any = getattr(transformers, name)(getattr(transformers, config)(**values))
    for dtype in HALVES:
        model.to(dtype).save_pretrained(tmp_path / "model")
        library = theirs(tmp_path / "model", name, dtype=dtype)
        for asked in (str(dtype).removeprefix("torch."), None):
            ours = sdquant.load_model(tmp_path / "model", dtype=asked, progress=False)
            assert dtypes(ours) == dtypes(library)


def test_what_submodels_say_counts() -> None:
    """Classes of transformers that are made of others: the whole has the patterns of its parts."""

    model: Any = nn.Module()
    model.config = type("Config", (), {"to_json_string": None})()
    model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = {"wo"}, {"gate.*bias"}
    said = float32_of_model(model)
    assert said.keeps("text.block.wo.weight", "float16") and not said.keeps("text.block.wo.weight", "bfloat16")
    assert said.keeps("mlp.gate.e_score_bias", "bfloat16") and said.dtype("mlp.up.weight", "float16") == "float16"
    assert said.dtype("text.block.wo.weight", "float32") == "float32"


def test_in_diffusers_a_pattern_is_a_whole_word() -> None:
    said = float32_of_class("Krea2Transformer2DModel")
    assert said.keeps("blocks.0.norm1.weight", "bfloat16") and not said.keeps("blocks.0.norm10.weight", "bfloat16")

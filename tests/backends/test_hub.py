"""Quantized folders of the hub: GPTQ, AWQ, AutoRound, HQQ, compressed-tensors, and FP8 with blocks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sdquant
from sdquant.core import input_columns
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.models.components import quiet
from sdquant.nn import quantized_layer
from sdquant.nn.layer_factory import set_compute
from sdquant.nn.weights import plain, quantized
from sdquant.training import digits

from .. import encoders
from ..entry_points import answers, copied, one_answer
from ..hub_formats import KINDS, Kind, is_packable, rewrite
from ..test_load_modes import images
from . import torchao_layers
from .comfy_layers import GOLDEN
from .test_modelopt import KINDS as MODELOPT_KINDS
from .test_modelopt import METHOD

DAILY = ("fp8 blocks", "ct mxfp6", "ct w4a16 asymmetric", "ct w8a8", "ct nvfp4", "gptq shuffled", "awq", "hqq")
# The library computes the golden weight in the dtype of its scales.
ROUNDED = {
    "ct_w4a16_g32_sym": "bfloat16", "ct_w8a16_channel": "bfloat16", "ct_nvfp4": "bfloat16", "ct_fp8_tensor": "float32",
    "gptq_w4_asym_autoround": "float16", "gptq_w4_asym_v1": "float16", "gptq_w4_sym_v1": "float16",
    "awq_gemm_w4_g32": "float16", "transformers_fp8_block16x32": "float32",
}  # fmt: skip

MODELOPT = Kind("mxfp4", "MXFP4", METHOD, MODELOPT_KINDS["mxfp4"][1])


@pytest.mark.parametrize("name", ROUNDED)
def test_golden(name: str) -> None:
    """Bit for bit what the libraries make of their layers, once it is rounded as they do."""
    file = GOLDEN / f"{name}.safetensors"
    (weight,) = (t for key, t in sdquant.dequantize(file, dtype=ROUNDED[name]) if key == "layer.weight")
    with safe_open(file, "pt") as stored:
        assert torch.equal(weight, stored.get_tensor("golden.weight").to(weight.dtype))


def _encoder(place: Path, part: str = "text_encoder_2") -> Path:
    return copied(Path(sdquant.demo.path("digits-flux")) / part, place)


def _of(kind: str, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    return folder, rewrite(folder, KINDS[kind])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in KINDS]
)
def test_a_text_encoder(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    folder, values = _of(name, _encoder(tmp_path / "model"))
    seen = sdquant.detect(folder)
    assert (seen.quant, seen.warnings) == (kind.quant, [])
    assert any(kind.words in line and f"({len(values)} weights)" in line for line in seen.evidence), seen.evidence
    assert sdquant.verify(folder).quant == kind.quant and sdquant.plan(folder).bytes > 0
    model = sdquant.load_model(folder, progress=False)
    packs = dict(quantized(model))
    assert packs.keys() == values.keys()
    for key, packed in packs.items():
        weight = packed.spec.scheme.codec.decode(packed, torch.float32)
        assert torch.equal(weight, values[key]) if kind.exact else torch.allclose(weight, values[key], rtol=1e-6)
        assert packed.spec.scheme.codec.form(input_columns.without(packed)) is not None  # for kernels
    _dequantized(folder, values, kind)
    _saved(model, tmp_path / "saved")


def _dequantized(folder: Path, values: dict[str, Tensor], kind: Kind) -> None:
    floats = dict(sdquant.dequantize(folder))
    original = load_file(next((Path(sdquant.demo.path("digits-flux")) / "text_encoder_2").glob("*.safetensors")))
    assert floats.keys() == original.keys()
    for key, value in values.items():
        assert torch.equal(floats[key], value) if kind.exact else torch.allclose(floats[key], value, rtol=1e-6)


def _saved(model: Any, place: Path) -> None:
    """What sdquant saves loads again, and computes the same."""
    sdquant.save(model, place)
    again = sdquant.load_model(place, progress=False)
    mine, theirs = dict(quantized(again)), dict(quantized(model))
    assert mine.keys() == theirs.keys()
    for key, packed in theirs.items():
        assert mine[key].spec == packed.spec
        assert all(torch.equal(mine[key].parts[part].float(), t.float()) for part, t in packed.parts.items())
    words = torch.arange(12)[None] % model.config.vocab_size
    with torch.no_grad():
        assert torch.equal(again(words).last_hidden_state, model(words).last_hidden_state)


def test_mxfp8_that_nothing_tells_from_comfyuis(tmp_path: Path) -> None:
    """Of the same shapes, with scales in another order; and a weight without its scale is not taken for values."""
    folder, _ = _of("ct mxfp8", _encoder(tmp_path / "model"))
    (file,) = folder.glob("*.safetensors")
    for ask in (sdquant.detect, sdquant.verify, sdquant.dequantize):
        with pytest.raises(UnsupportedFileError, match=r"nothing tells whether these lie .* or in tiles \(ComfyUI"):
            ask(Path(shutil.copy(file, tmp_path / "lone.safetensors")))  # type: ignore[operator]
    tensors = load_file(file)
    tensors.pop(min(key for key in tensors if key.endswith("weight_scale")))
    save_file(tensors, file, metadata={"format": "pt"})
    for ask in (sdquant.detect, sdquant.verify, sdquant.plan, sdquant.load_model, sdquant.dequantize):
        with pytest.raises(BadFileError, match="float8 without a scale"):
            ask(folder)  # type: ignore[operator]


def test_a_weight_that_is_there_twice(tmp_path: Path) -> None:
    folder, values = _of("ct w4a16", _encoder(tmp_path / "model"))
    (file,) = folder.glob("*.safetensors")
    key = min(values)
    save_file(load_file(file) | {key: values[key].bfloat16()}, file, metadata={"format": "pt"})
    for ask in (sdquant.detect, sdquant.verify, sdquant.plan, sdquant.load_model, sdquant.dequantize):
        with pytest.raises(BadFileError, match="both as it is and quantized"):
            ask(folder)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["gptq shuffled", "hqq axis 0", "ct w3a16"])
def test_computes_with_the_weights_that_it_has(name: str, tmp_path: Path) -> None:
    folder, values = _of(name, _encoder(tmp_path / "model"))
    model = sdquant.load_model(folder, dtype="float32", progress=False)
    floats = _encoder(tmp_path / "floats")
    (file,) = floats.glob("*.safetensors")
    save_file({key: values.get(key, t) for key, t in load_file(file).items()}, file, metadata={"format": "pt"})
    other = sdquant.load_model(floats, dtype="float32", progress=False)
    words = torch.arange(12)[None] % model.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(model(words).last_hidden_state, other(words).last_hidden_state, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["gptq shuffled", pytest.param("gptq 3", marks=pytest.mark.slow)])
def test_groups_that_are_not_of_neighbours(name: str, tmp_path: Path) -> None:
    """The codes are sorted by group for the kernels, and what the layer multiplies is gathered like them."""
    model = sdquant.load_model(_of(name, _encoder(tmp_path / "model"))[0], dtype="float32", progress=False)
    layer = next(one for one in model.modules() if input_columns.ORDER in getattr(one, "part_names", ()))
    layer.requires_grad_(False)
    floats = nn.Linear(layer.in_features, layer.out_features, bias=False)
    codes, order = quantized_layer(floats, input_columns.without(layer.packed)), layer.packed.parts["order"].long()
    x = torch.randn(70, layer.in_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for dtype, compute in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")):
            set_compute(codes, compute), set_compute(layer, compute)
            for rows in (1, 70):
                y = layer(x[:rows].to(dtype))
                assert torch.equal(y, codes(x[:rows, order].to(dtype)))
                assert torch.equal(y, torch.compile(layer, fullgraph=True, backend="eager")(x[:rows].to(dtype)))
                torch.testing.assert_close(y.float(), x[:rows] @ layer.dequantize().T, atol=0.05, rtol=0.05)
    set_compute(layer, None)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, layer.dequantize().sum(0).expand_as(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["auto-round", pytest.param("gptq shuffled", marks=pytest.mark.slow)])
def test_in_a_pipeline(name: str, tmp_path: Path) -> None:
    """A transformer and an encoder, in diffusers' and in transformers' folders, offloaded."""
    folder = copied(Path(sdquant.demo.path("digits-flux")), tmp_path / "pipe")
    for part in ("transformer", "text_encoder_2"):
        rewrite(folder / part, KINDS[name])
    assert sdquant.detect(folder).parts["transformer"].quant == "hub-int4"
    pipe = sdquant.load_model(folder, offload="sequential", progress=False)
    assert len(list(quantized(pipe.transformer))) and len(list(quantized(pipe.text_encoder_2)))
    size = {"height": digits.SIZE, "width": digits.SIZE}  # Flux by default: 512 pixels
    image = pipe("3", num_inference_steps=1, output_type="pt", **size).images
    assert torch.isfinite(image).all()


@pytest.mark.parametrize("who", ["compressed-tensors", "torchao", "ModelOpt"])
def test_mxfp4_is_moved_as_any_plain_weight(who: str, tmp_path: Path) -> None:
    """It becomes blocks of GGUF's scheme; that a GGUF file's model is not to be moved is no matter to it."""
    folder = copied(Path(sdquant.demo.path("digits-flux")), tmp_path / "pipe")
    if who == "torchao":
        torchao_layers.digits(folder / "transformer", ["mxfp4"])
    else:
        rewrite(folder / "transformer", KINDS["ct mxfp4"] if who == "compressed-tensors" else MODELOPT)
    values: dict[str, Any] = {"dtype": "float32", "progress": False}
    wanted, pipe = (sdquant.load_model(folder, offload=mode, **values) for mode in ("none", "model"))
    assert {packed.spec.scheme.name for _, packed in quantized(pipe.transformer)} == {"mxfp4"}
    drawn = images(wanted, 1)
    assert np.array_equal(images(pipe, 1), drawn)
    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", offload="model", **values)
    assert np.array_equal(images(again, 1), drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen2_5_VLForConditionalGeneration", "gptq"),
        ("Mistral3ForConditionalGeneration", "fp8 small blocks"),
        ("Gemma3ForConditionalGeneration", "ct w4a16"),
        ("Qwen3Model", "awq"),
        ("CLIPTextModel", "hqq"),
    ],
)
def test_language_models(model: str, name: str, tmp_path: Path) -> None:
    """Whose names in files are others than the model's; saved by transformers, and loaded by it with sdquant."""
    with quiet():
        encoders.model(model).save_pretrained(tmp_path / "model")
    _, values = _of(name, tmp_path / "model")
    mine = sdquant.load_model(tmp_path / "model", progress=False)
    packs = dict(quantized(mine))
    assert len(packs) == len(values)
    with quiet():
        mine.save_pretrained(tmp_path / "saved")
        theirs = encoders.kind(model).from_pretrained(tmp_path / "saved")
    for again in (sdquant.load_model(tmp_path / "saved", progress=False), theirs):
        other = dict(quantized(again))
        assert other.keys() == packs.keys()
        for key, packed in packs.items():
            assert all(torch.equal(other[key].parts[part].float(), t.float()) for part, t in packed.parts.items())


def test_as_a_part_of_another_pipeline(tmp_path: Path) -> None:
    folder, values = _of("awq", _encoder(tmp_path / "encoder"))
    pipe = sdquant.load_model(sdquant.demo.path("digits-flux"), parts={"text_encoder_2": folder}, progress=False)
    assert dict(quantized(pipe.text_encoder_2)).keys() == values.keys()


def test_a_config_from_the_caller(tmp_path: Path) -> None:
    """A lone file, of whose zero points nothing tells what they mean."""
    folder, values = _of("gptq v2", _encoder(tmp_path / "model"))
    file = Path(shutil.copy(next(folder.glob("*.safetensors")), tmp_path / "lone.safetensors"))
    with pytest.raises(UnsupportedFileError, match="nothing tells whether its zero points are less one"):
        sdquant.dequantize(file)
    floats = dict(sdquant.dequantize(file, config=dict(KINDS["gptq v2"].config)))
    assert all(torch.equal(floats[key], value) for key, value in values.items())


def _changed(folder: Path, **said: Any) -> Path:
    config = folder / "config.json"
    values = json.loads(config.read_text())
    values["quantization_config"] |= said
    config.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", ["ct nvfp4", "ct mxfp4"])
def test_autorounds_floats_are_no_contradiction(name: str, tmp_path: Path) -> None:
    """It writes them as compressed-tensors does, and says in the config that they are its own."""
    folder = _changed(_of(name, _encoder(tmp_path / "model"))[0], quant_method="auto-round")
    seen = sdquant.detect(folder)
    assert (seen.quant, seen.warnings) == (KINDS[name].quant, [])


def test_autorounds_integers_that_look_like_mxfp4(tmp_path: Path) -> None:
    folder = _changed(_of("ct mxfp4", _encoder(tmp_path / "model"))[0], quant_method="auto-round", data_type="mx_int")
    for ask in (sdquant.detect, sdquant.verify, sdquant.plan, sdquant.load_model, sdquant.dequantize):
        with pytest.raises(UnsupportedFileError, match="4-bit integers with powers of two as scales"):
            ask(folder)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "said", "words"),
    [
        ("gptq symmetric", {"checkpoint_format": "gptq_v2"}, "zero points are in the middle only if"),
        ("gptq", {"checkpoint_format": "marlin"}, "'marlin'"),
        ("auto-round", {"packing_format": None}, "does not say its packing_format"),
        ("auto-round", {"packing_format": "itrex"}, "'itrex'"),
        ("awq", {"version": "gemv"}, "'gemv'"),
        ("ct w4a16", {"config_groups": {}}, "nothing tells the bits"),
        ("gptq", {"quant_method": "awq"}, "nothing tells whether its zero points"),
        ("gptq", {"group_size": 64}, "says that it has groups of 64"),
        (
            "ct w4a16",
            {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 64}}}},
            "its config says groups of 64",
        ),
    ],
)
def test_what_nothing_tells_is_refused(name: str, said: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder, _ = _of(name, _encoder(tmp_path / "model"))
    call = sdquant.verify if "middle" in words else sdquant.detect
    with pytest.raises(UnsupportedFileError) as caught:
        call(_changed(folder, **said))
    assert words in caught.value.why and "sdquant matrix" in caught.value.fix


@pytest.mark.parametrize("name", ["ct w4a16", "ct w8a8"])
def test_zero_points_that_the_config_has_and_the_file_has_not(name: str, tmp_path: Path) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": False}}
    folder = _changed(_of(name, _encoder(tmp_path / "model"))[0], config_groups={"a": group})
    with pytest.raises(BadFileError, match="weight_zero_point"):
        sdquant.detect(folder)


def test_zero_points_of_three_bits_for_any_rows(tmp_path: Path) -> None:
    """Their words are whole, their units of eight codes need not be."""
    kind = KINDS["ct w3a16"]
    layer, values = kind.make(torch.randn(41, 64, generator=torch.Generator().manual_seed(2)).half())
    save_file({f"layer.{last}": part.contiguous() for last, part in layer.items()}, tmp_path / "m.safetensors")
    (weight,) = dict(sdquant.dequantize(tmp_path / "m.safetensors", config=dict(kind.config))).values()
    assert torch.equal(weight, values)


def test_config_groups_with_targets(tmp_path: Path) -> None:
    """Bits by a layer's name before its class, and layers that are left out."""
    folder = _encoder(tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(file).items():
        if not is_packable(key, tensor) or ".wo." in key:
            tensors[key] = tensor
            continue
        made, _ = KINDS["ct w8a16" if ".SelfAttention." in key else "ct w4a16"].make(tensor)
        tensors |= {key.removesuffix("weight") + last: part.contiguous() for last, part in made.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}},
        "group_1": {"targets": ["re:.*SelfAttention.*"], "weights": {"num_bits": 8}},
    }
    said = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["re:.*wo"]}
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": said}))
    sdquant.verify(folder)
    rows = sdquant.detect(folder).sources["model"].prequantized
    assert {row.scheme for name, row in rows.items() if "SelfAttention" in name} == {"hub-int8"}
    assert {row.scheme for name, row in rows.items() if "SelfAttention" not in name} == {"hub-int4"}
    assert not any(".wo." in name for name in rows)


def test_a_target_that_takes_for_ever(tmp_path: Path) -> None:
    """Its pattern is matched to the names of layers, which can be chosen so that it never ends."""
    group = {"targets": [r"re:(\w+\.?)+!"], "weights": {"num_bits": 4}}
    folder = _changed(_of("ct w4a16", _encoder(tmp_path / "model"))[0], config_groups={"group_0": group})
    with pytest.raises(BadFileError, match=r"its config\.json has 're:\(.* for ever") as caught:
        sdquant.detect(folder)
    assert str(folder) in caught.value.what


@pytest.mark.parametrize(
    ("name", "last", "change", "words"),
    [
        ("gptq", "qzeros", None, "qzeros"),
        ("gptq", "scales", lambda t: t.fill_(torch.nan), "not a number"),
        ("gptq", "g_idx", lambda t: t.fill_(0), "columns into each of"),
        ("gptq", "g_idx", lambda t: t.fill_(2**31 - 1), "columns into each of"),  # not 16 GiB of counts
        ("gptq", "g_idx", lambda t: t + 0.5, "not int32"),
        ("gptq", "qweight", lambda t: t[:-1], "have 4 scales"),
        ("awq", "scales", lambda t: t[:, :-8], "neither in GPTQ's order nor"),
        ("ct w4a16", "weight_scale", None, "weight_scale"),
        ("ct w4a16", "weight_shape", lambda t: t + 8, "words a row"),
        ("ct nvfp4", "weight_global_scale", lambda t: t.zero_(), "positive"),
        ("hqq", "zero", None, "zero"),
        ("hqq", "nbits", lambda t: t + 4, "8 bits"),
        ("hqq", "view_as_float", lambda t: t + 1, "view_as_float"),
        ("hqq", "shape", lambda t: t[:1], "has two"),
    ],
)
def test_a_damaged_file(name: str, last: str, change: Any, words: str, tmp_path: Path) -> None:
    folder, values = _of(name, _encoder(tmp_path / "model"))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    key = next(iter(values)).removesuffix("weight") + last
    tensor = tensors.pop(key)
    if change is not None:
        tensors[key] = change(tensor).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    for call in (sdquant.verify, lambda path: sdquant.load_model(path, progress=False)):
        with pytest.raises((BadFileError, UnsupportedFileError), match=words):
            call(folder)


def test_experts_in_float8(tmp_path: Path) -> None:
    """Which transformers keeps as parameters, with their scales beside them: they were cast, and the scales dropped."""
    folder = _encoder(tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    codes = torch.ones(2, 8, 8).to(torch.float8_e4m3fn)
    more = {"experts.up_proj": codes, "experts.up_proj_scale_inv": torch.ones(2, 1, 1)}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    one_answer(folder, UnsupportedFileError, "experts.up_proj_scale_inv")


def test_plain_weights_stay(tmp_path: Path) -> None:
    folder, values = _of("gptq", _encoder(tmp_path / "model"))
    assert set(answers(folder).values()) == {None}
    model = sdquant.load_model(folder, progress=False)
    assert not plain(model).keys() & values.keys()

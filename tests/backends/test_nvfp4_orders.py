"""NVFP4 and fp8r as Black Forest Labs and ModelOpt have them, and the guard between the two orders of NVFP4."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_kitchen.tensor import TensorCoreNVFP4Layout
from diffusers.quantizers.bfl.utils import dequantize_nvfp4, quantize_nvfp4
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sdquant
from sdquant import backends
from sdquant.cli import main
from sdquant.core import packed_rows, read_weight
from sdquant.errors import BadFileError, SettingsError, UnsupportedFileError
from sdquant.formats import component_configs
from sdquant.formats.checkpoint import single_file
from sdquant.nn import quantized_layer
from sdquant.ui import readings
from sdquant.ui.page_words import in_page_words

from .. import malformed
from .comfy_layers import GOLDEN, read

COMFY = backends.get("comfy")


@pytest.mark.parametrize("name", ["bfl_nvfp4", "modelopt_nvfp4", "bfl_fp8r"])
def test_golden(name: str) -> None:
    packed, file = read(GOLDEN / f"{name}.safetensors"), load_file(GOLDEN / f"{name}.safetensors")
    assert packed.spec.scheme.name == ("fp8" if name == "bfl_fp8r" else "comfy:nvfp4")
    weight = packed.spec.scheme.codec.decode(packed, torch.float32)
    assert (weight - file["golden.weight"]).norm() <= 1e-6 * weight.norm()
    if "golden.output" in file:
        floats = nn.Linear(80, 24, dtype=torch.bfloat16)
        floats.bias.data = file["layer.bias"]
        with torch.no_grad():
            out = quantized_layer(floats, packed)(file["golden.input"])
        assert (out - file["golden.output"]).norm() <= 4e-3 * out.norm()


def _weight(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 0.05


def _layers(shapes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """A file in diffusers' own order."""
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        codes, scale, second = quantize_nvfp4(_weight(shape))
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale, f"{name}.weight_scale_2": second}
        tensors[f"{name}.input_scale"] = torch.tensor(0.01)
    return tensors


WHOLE, ODD = (128, 256), (32, 80)  # the scales of the first are whole tiles, of the second not


def _saved(folder: Path, tensors: dict[str, Tensor], config: Any = None, metadata: Any = None) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"_class_name": "Nobody", "quantization_config": config}))
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    ("shapes", "config", "metadata"),
    [
        ({"proj": ODD}, None, None),
        ({"proj": WHOLE, "other": ODD}, None, None),
        ({"proj": WHOLE, "other": ODD}, None, {"quantization_config": json.dumps({"quant_method": "modelopt"})}),
        ({"proj": WHOLE}, None, {"quantization_config": json.dumps({"quant_method": "bfl"})}),
    ],
)
def test_what_tells_the_order(shapes: Any, config: Any, metadata: Any, tmp_path: Path) -> None:
    tensors = _layers(shapes)
    path = _saved(tmp_path, tensors, config, metadata)
    seen = sdquant.verify(path)
    assert (seen.quant, seen.warnings) == ("comfy:nvfp4", [])
    assert any("of ModelOpt or Black Forest Labs" in line for line in seen.evidence)
    packed = read_weight(single_file(path).prequantized["proj.weight"], None, shapes["proj"], tensors.__getitem__)
    theirs = dequantize_nvfp4(*(tensors[f"proj.{key}"] for key in ("weight", "weight_scale", "weight_scale_2")))
    assert torch.equal(COMFY.decode(packed, torch.float32), theirs)
    rows = COMFY.decode(packed_rows.cut(packed, [(5, 9)]), torch.float32)
    assert torch.equal(rows, theirs[5:9])


@pytest.mark.parametrize("order", ["theirs", "ComfyUI's"])
def test_an_order_that_nobody_tells(order: str, tmp_path: Path) -> None:
    tensors = _layers({"proj": WHOLE})
    if order == "ComfyUI's":
        codes, params = TensorCoreNVFP4Layout.quantize(_weight(WHOLE))
        tensors = {"proj.weight": codes, "proj.weight_scale": params.block_scale, "proj.weight_scale_2": params.scale}
    with pytest.raises(UnsupportedFileError) as caught:
        sdquant.detect(_saved(tmp_path, tensors))
    assert "ComfyUI's (the even column in the high half" in caught.value.why
    assert "Black Forest Labs' (the other half" in caught.value.why and "'proj.weight'" in caught.value.what


def test_scales_in_tiles_without_a_marker(tmp_path: Path) -> None:
    codes, params = TensorCoreNVFP4Layout.quantize(_weight(ODD))
    file = {"proj.weight": codes, "proj.weight_scale": params.block_scale, "proj.weight_scale_2": params.scale}
    with pytest.raises(UnsupportedFileError, match="nothing in it tells which"):
        sdquant.detect(_saved(tmp_path, file))
    told = {"quantization_config": json.dumps({"quant_method": "bfl"})}
    with pytest.raises(BadFileError, match="32 x 5"):
        sdquant.verify(_saved(tmp_path, file, metadata=told))


def _tiled(scale: Tensor) -> Tensor:
    """As ModelOpt's `swizzle_nvfp4_scales` orders them for cuBLAS: 128 x 4 at once."""
    rows, columns = scale.shape
    blocks = scale.view(rows // 128, 128, columns // 4, 4).transpose(1, 2).reshape(-1, 4, 32, 4).transpose(1, 2)
    return blocks.reshape(rows, columns)


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("is_tiled", [True, False])
def test_what_modelopt_writes_for_comfyui(is_listed: bool, is_tiled: bool, tmp_path: Path) -> None:
    """Its `enable_layerwise_quant_metadata` and `enable_swizzle_layout` (0.47): halves stay in its own order."""
    tensors = _layers({"proj": WHOLE})
    tensors["proj.weight_scale"] = _tiled(tensors["proj.weight_scale"]) if is_tiled else tensors["proj.weight_scale"]
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.47.0"}}
    listed = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {"proj": {"format": "nvfp4"}}})}
    metadata = {"quantization_config": json.dumps(config), **(listed if is_listed else {})}
    path = _saved(tmp_path, tensors, None, metadata)
    for ask in (sdquant.detect, sdquant.dequantize):
        with pytest.raises(UnsupportedFileError, match="Cannot tell the order") as caught:
            ask(path)
        assert "in tiles" in caught.value.why and "in the order of the weight" in caught.value.why
    if is_listed:
        assert "high half" in caught.value.why and "low half" in caught.value.why
        marker = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)  # ComfyUI's own, which tells
        assert sdquant.detect(_saved(tmp_path, tensors | {"proj.comfy_quant": marker}, None, metadata)).quant


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.47.0"}}
NAME, SHAPE = malformed.NAME, (256, 64)  # scales of 256 x 4, whole tiles
SAID: dict[str, dict[str, Any]] = {
    "ComfyUI's": {"quant_method": "comfyui", "format": "nvfp4"},
    "theirs": {"quant_method": "modelopt"},
    "in tiles": {"quant_method": "modelopt", "enable_swizzle_layout": True},
    "not in tiles": {"quant_method": "modelopt", "enable_swizzle_layout": False},
}


def _in_order(order: str, stem: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer, and its weight by the library of that order."""
    if order == "ComfyUI's":
        codes, params = TensorCoreNVFP4Layout.quantize(_weight(SHAPE))
        tensors = {"weight": codes, "weight_scale": params.block_scale, "weight_scale_2": params.scale}
        return {stem + key: t for key, t in tensors.items()}, TensorCoreNVFP4Layout.dequantize(codes, params).float()
    parts = dict(zip(("weight", "weight_scale", "weight_scale_2"), quantize_nvfp4(_weight(SHAPE)), strict=True))
    weight = dequantize_nvfp4(*parts.values())
    parts["weight_scale"] = _tiled(parts["weight_scale"]) if order == "in tiles" else parts["weight_scale"]
    return {stem + key: tensor for key, tensor in parts.items()}, weight


@pytest.mark.parametrize(
    ("order", "named"),  # ModelOpt, in the file's metadata
    [
        ("ComfyUI's", "no"), ("theirs", "no"), ("in tiles", "in a config"), ("ComfyUI's", "in a list"),
        ("in tiles", "in a list"), ("not in tiles", "in a list"),
    ],
)  # fmt: skip
def test_a_user_can_say_the_order(order: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer, weight = _in_order(order, malformed.STEM)
    floats = load_file(malformed.tiny(tmp_path / "floats") / malformed.WEIGHTS)
    layers = {NAME.removesuffix(".weight"): {"format": "nvfp4"}}
    metadata = {"quantization_config": json.dumps(MODELOPT)} if named != "no" else {}
    metadata |= {"_quantization_metadata": json.dumps({"layers": layers})} if named == "in a list" else {}
    (tmp_path / "lone").mkdir()
    path = _saved(tmp_path / "lone", {k: t for k, t in floats.items() if k != NAME} | layer, None, metadata)
    model = json.loads((tmp_path / "floats" / "config.json").read_text())
    asks = (sdquant.detect, sdquant.verify, sdquant.plan, sdquant.load_model, sdquant.dequantize)
    errors = []
    for ask in asks:
        with pytest.raises(UnsupportedFileError, match="Cannot tell the order") as caught:
            ask(path)
        errors.append(str(caught.value))
    assert len({*errors}) == 1
    ways = [ast.literal_eval(text) for text in re.findall(r"config=(\{[^}]*\})", caught.value.fix)]
    assert SAID[order] in ways

    said: Any = SAID[order]
    assert sdquant.detect(path, config=said).quant == "comfy:nvfp4"
    assert sdquant.verify(path, config=json.dumps(said)).warnings == []
    assert sdquant.plan(path, config=said).components[0].scheme == "comfy:nvfp4"
    assert torch.equal(dict(sdquant.dequantize(path, config=said))[NAME], weight)
    whole = sdquant.load_model(path, config=model | {"quantization_config": said}, progress=False)
    packed = dict(sdquant.nn.weights.quantized(whole))[NAME]
    assert torch.equal(packed.spec.scheme.codec.decode(packed, torch.float32), weight)

    assert main(["inspect", str(path)]) == 2
    words = re.findall(r"--config '(\{.*?\})'", capsys.readouterr().err.replace("\n", " "))
    assert said in [json.loads(re.sub(r"\s+", " ", text)) for text in words]
    assert main(["inspect", "--verify", "--config", json.dumps(said), str(path)]) == 0
    assert f"“{readings.label(said)}” at Together with" in in_page_words(caught.value.fix)
    assert json.loads(readings.readings(caught.value)[readings.label(said)]) == said
    beside = re.findall(r"(\{.*?\}\}) in a config.json", component_configs.in_words_of_files(caught.value.fix))
    assert {"quantization_config": said} in [json.loads(text) for text in beside]
    (path.parent / "config.json").write_text(json.dumps({"quantization_config": said}))
    assert torch.equal(dict(sdquant.dequantize(path))[NAME], weight) and sdquant.verify(path).quant == "comfy:nvfp4"


def test_what_cannot_be_said(tmp_path: Path, sd: Path) -> None:
    path = _saved(tmp_path, _layers({"proj": WHOLE}))
    for said, kind, word in (
        ({"quant_method": "comfyui"}, BadFileError, "not in which of its formats"),
        ({"quant_method": "comfyui", "format": "nvfp5"}, UnsupportedFileError, "nvfp5"),
        ({"quant_method": "modelopt", "enable_swizzle_layout": "no"}, BadFileError, "neither true nor false"),
        ({}, SettingsError, "neither a mapping"), ("{", SettingsError, "not JSON"), (str(sd), SettingsError, "base="),
    ):  # fmt: skip
        for ask in (sdquant.detect, sdquant.dequantize, sdquant.plan):
            with pytest.raises(kind, match=word):
                ask(path, config=said)
    with pytest.raises(SettingsError, match="each of whose components"):
        sdquant.load_model(sd, config=SAID["theirs"])


def test_a_user_can_say_what_integers_of_comfyui_are(tmp_path: Path) -> None:
    """INT8 and INT8 ConvRot have the same tensors."""
    for scheme, more in (("int8_row", {}), ("int8_convrot", {"convrot": True, "convrot_groupsize": 64})):
        packed = COMFY.encode(_weight((32, 64)), backends.parse(scheme))
        tensors = {key: t for key, t in COMFY.export("proj.weight", packed).items() if not key.endswith("comfy_quant")}
        path = _saved(tmp_path, tensors)
        with pytest.raises(UnsupportedFileError, match="comfy_quant"):
            sdquant.detect(path)
        said = {"quant_method": "comfyui", "format": "int8_tensorwise", **more}
        assert sdquant.verify(path, config=said).quant == scheme
        got = dict(sdquant.dequantize(path, config=said))["proj.weight"]
        assert torch.equal(got, COMFY.decode(packed, torch.float32))


@pytest.mark.parametrize("gone", ["weight_scale", "weight_scale_2"])
def test_a_layer_that_lacks_a_scale(gone: str, tmp_path: Path) -> None:
    tensors = _layers({"proj": ODD, "other": ODD})
    del tensors[f"other.{gone}"]
    with pytest.raises(BadFileError, match=rf"it has no 'other\.{gone}'"):
        sdquant.detect(_saved(tmp_path, tensors))


def test_kinds_of_layers_in_one_file(tmp_path: Path) -> None:
    """fp8r, nvfp4 and floats, as Black Forest Labs mix them."""
    tensors = _layers({"proj": ODD})
    wide = _weight(ODD)
    scale = wide.abs().amax(1) / 448
    tensors |= {"other.weight": (wide / scale[:, None]).to(torch.float8_e4m3fn), "other.weight_scale": scale}
    seen = sdquant.verify(_saved(tmp_path, tensors | {"norm.weight": torch.ones(8)}))
    schemes = {name: row.scheme for name, row in seen.sources["model"].prequantized.items()}
    assert schemes == {"proj.weight": "comfy:nvfp4", "other.weight": "fp8"} and len(seen.evidence) == 2

"""sdquant through diffusers' own `from_pretrained` and `save_pretrained`."""

from __future__ import annotations

import copy
import gc
import json
import logging
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel, UNet2DConditionModel
from diffusers.quantizers import PipelineQuantizationConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import sdquant
from sdquant import backends, demo
from sdquant.nn import QuantizedLayer, packed_of
from sdquant.nn.weights import quantized

SCHEMES = [row.name for row in backends.schemes() if row.on_the_fly]
FLUX = demo.path("digits-flux") / "transformer"
UNET = demo.path("digits-sd") / "unet"


def damage_scale(folder: Path, damage: str) -> None:
    """The first scale of a saved component: with a NaN in it ("not finite"), or without its last value ("short")."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    found = next(iter(sdquant.detect(file).sources["model"].prequantized.values()))
    key = found.keys[next(part for part in found.keys if part in ("scale", "absmax"))]
    tensors = load_file(file)
    if damage == "short":
        tensors[key] = tensors[key][:-1].contiguous()
    else:
        tensors[key].view(-1)[0] = torch.nan
    save_file(tensors, file, metadata)


def same(one: nn.Module, other: nn.Module) -> None:
    """The same weights, bit for bit."""
    ours, theirs = dict(quantized(one)), dict(quantized(other))
    assert set(ours) == set(theirs) and ours
    for name, packed in ours.items():
        assert packed.spec == theirs[name].spec
        for part, tensor in packed.parts.items():
            bits, wanted = (t.reshape(-1).view(torch.uint8) for t in (tensor, theirs[name].parts[part]))
            assert torch.equal(bits, wanted), (name, part)
    floats = dict(one.named_parameters())
    for name, tensor in other.named_parameters():
        if "packed_" not in name and tensor.numel():
            assert torch.equal(tensor, floats[name]) and tensor.dtype == floats[name].dtype, name


@pytest.fixture
def remarks() -> Iterator[list[str]]:
    """Warnings of diffusers' logger, which passes nothing on to the root."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("diffusers").addHandler(handler)
    yield heard
    logging.getLogger("diffusers").removeHandler(handler)


@pytest.mark.parametrize("quant", [*SCHEMES, "nf4,double_quant", "int4,group_size=32"])
def test_on_the_fly_saved_and_loaded_again(quant: str, tmp_path: Path, remarks: list[str]) -> None:
    ours = sdquant.load_model(FLUX, quant, runtime="plain", progress=False)
    config = sdquant.Config(quant)
    model = FluxTransformer2DModel.from_pretrained(FLUX, torch_dtype=torch.bfloat16, quantization_config=config)
    same(model, ours)
    model.save_pretrained(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written == {"quant_method": "sdquant", "quant": quant, "skip": []}
    again = FluxTransformer2DModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    assert not remarks  # such as of weights that are "newly initialized"
    same(again, ours)
    same(sdquant.load_model(tmp_path / "out", runtime="plain", progress=False), ours)
    assert sdquant.detect(tmp_path / "out").quant == quant.partition(",")[0]


@pytest.mark.parametrize("quant", ["int8", "qint3", "fp8"])
def test_what_sdquant_saved_loads_in_diffusers(quant: str, tmp_path: Path) -> None:
    """Convolutions too, which no quantizer of diffusers' own takes."""
    ours = sdquant.load_model(UNET, quant, runtime="plain", progress=False)
    assert any(isinstance(ours.get_submodule(name.rpartition(".")[0]), nn.Conv2d) for name, _ in quantized(ours))
    sdquant.save(ours, tmp_path / "out")
    same(UNet2DConditionModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16), ours)


@pytest.mark.parametrize("quant", ["nf4", "bnb-int8", "qint8"])
def test_what_diffusers_can_read_itself_names_its_own_quantizer(quant: str, tmp_path: Path) -> None:
    sdquant.save(sdquant.load_model(FLUX, quant, progress=False), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] != "sdquant"


def test_in_shards(tmp_path: Path) -> None:
    config = sdquant.Config("int8")
    model = FluxTransformer2DModel.from_pretrained(FLUX, torch_dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained(tmp_path / "out", max_shard_size="1MB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    same(FluxTransformer2DModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16), model)
    same(sdquant.load_model(tmp_path / "out", progress=False), model)


def test_the_pictures_are_those_of_load_model(tmp_path: Path) -> None:
    from sdquant.models.generate import draw

    def picture(pipe: Any) -> bytes:
        drawn: bytes = draw(pipe, ["a photo of the digit 3"], seeds=[1], steps=2)[0].tobytes()
        return drawn

    ours = sdquant.load_model(demo.path("digits-flux"), "int8", components=["transformer"], progress=False)
    mapping = PipelineQuantizationConfig(quant_mapping={"transformer": sdquant.Config("int8")})
    folder = demo.path("digits-flux")
    theirs = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=mapping)
    assert picture(ours) == picture(theirs)
    theirs.save_pretrained(tmp_path / "out")
    assert picture(DiffusionPipeline.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)) == picture(ours)
    assert picture(sdquant.load_model(tmp_path / "out", progress=False)) == picture(ours)


def test_skip(tmp_path: Path) -> None:
    config = sdquant.Config("int8", skip=["single_transformer_blocks"])
    model = FluxTransformer2DModel.from_pretrained(FLUX, torch_dtype=torch.bfloat16, quantization_config=config)
    names = {name for name, _ in quantized(model)}
    assert names and not any("single_transformer_blocks" in name for name in names)
    assert packed_of(model.single_transformer_blocks[0].proj_mlp) is None


def test_without_a_dtype_weights_are_not_cut_to_codes() -> None:
    model = FluxTransformer2DModel.from_pretrained(FLUX, quantization_config=sdquant.Config("int8"))
    wanted = sdquant.load_model(FLUX, "int8", dtype="float32", progress=False)
    same(model, wanted)


class TestLife:
    """What else is done to a model that diffusers quantized."""

    def test_convolutions_that_wrap_around(self) -> None:
        """Web UIs set this padding for pictures that tile; torch keeps the sizes for it in an attribute of its own."""
        unet = UNet2DConditionModel.from_pretrained(UNET, quantization_config=sdquant.Config("int8"))
        conv: Any = unet.conv_in
        conv.padding_mode = "circular"
        x = torch.rand(1, conv.in_channels, 8, 8)
        around = nn.functional.pad(x, (1, 1, 1, 1), mode="circular")
        wanted = nn.functional.conv2d(around, conv.dequantize(), conv.bias, stride=conv.stride)
        assert isinstance(conv, QuantizedLayer)
        torch.testing.assert_close(conv(x), wanted, rtol=1e-5, atol=1e-5)  # few outputs may be summed in another order

    def test_floats_again(self, tmp_path: Path) -> None:
        model = UNet2DConditionModel.from_pretrained(UNET, dtype=torch.bfloat16, quantization_config=sdquant.Config())
        wanted = {name: model.get_submodule(name[:-7]).dequantize() for name, _ in quantized(model)}
        model.dequantize()
        assert model.dtype == torch.bfloat16 and not dict(quantized(model)) and wanted
        model.save_pretrained(tmp_path)
        again = dict(UNet2DConditionModel.from_pretrained(tmp_path, dtype=torch.bfloat16).named_parameters())
        assert all(torch.equal(again[name], tensor) for name, tensor in wanted.items())

    def test_a_copy_is_saved_as_itself(self, tmp_path: Path) -> None:
        model = FluxTransformer2DModel.from_pretrained(FLUX, quantization_config=sdquant.Config("int8"))
        other = copy.deepcopy(model)
        for tensor in other.parameters():
            if tensor.is_floating_point():
                tensor.data.zero_()
        other.save_pretrained(tmp_path)
        same(FluxTransformer2DModel.from_pretrained(tmp_path), other)

    def test_freed_with_its_last_reference(self, tmp_path: Path) -> None:
        model = FluxTransformer2DModel.from_pretrained(FLUX, quantization_config=sdquant.Config("int8"))
        model.save_pretrained(tmp_path)
        model = FluxTransformer2DModel.from_pretrained(tmp_path)
        there = weakref.ref(model)
        gc.collect()
        gc.disable()
        try:
            del model
            assert there() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}])
    def test_device_map(self, device_map: Any) -> None:
        model = FluxTransformer2DModel.from_pretrained(
            FLUX, dtype=torch.bfloat16, quantization_config=sdquant.Config("int8"), device_map=device_map
        )
        same(model, sdquant.load_model(FLUX, "int8", progress=False))

    def test_a_single_file(self, tmp_path: Path) -> None:
        file = FLUX / "diffusion_pytorch_model.safetensors"
        model = FluxTransformer2DModel.from_single_file(
            str(file), config=str(FLUX), torch_dtype=torch.bfloat16, quantization_config=sdquant.Config("int8")
        )
        same(model, sdquant.load_model(FLUX, "int8", progress=False))
        model.save_pretrained(tmp_path)
        same(FluxTransformer2DModel.from_pretrained(tmp_path, dtype=torch.bfloat16), model)


class TestRefused:
    def test_parts_on_disk(self, tmp_path: Path) -> None:
        """Named, or found by diffusers."""
        for device_map in ({"single_transformer_blocks": "disk", "": "cpu"}, "auto"):
            with pytest.raises(sdquant.IncompatibleError, match="offload='balanced'"):
                FluxTransformer2DModel.from_pretrained(
                    FLUX,
                    quantization_config=sdquant.Config("int8"),
                    device_map=device_map,
                    max_memory={"cpu": "1MB"},
                    offload_folder=tmp_path,
                )

    def test_another_dtype(self) -> None:
        model = FluxTransformer2DModel.from_pretrained(FLUX, quantization_config=sdquant.Config("int8"))
        with pytest.raises(ValueError, match="Casting a quantized model to a new `dtype` is unsupported"):
            model.to(torch.float16)

    def test_a_single_file_that_is_quantized(self, tmp_path: Path) -> None:
        sdquant.save(sdquant.load_model(FLUX, "int8", progress=False), tmp_path / "one.safetensors")
        with pytest.raises(sdquant.UnsupportedFileError, match=r"Load it with sdquant\.load_model\(file"):
            FluxTransformer2DModel.from_single_file(
                str(tmp_path / "one.safetensors"), config=str(FLUX), quantization_config=sdquant.Config("int8")
            )

    @pytest.mark.parametrize("scheme", ["int8", "qint3", "fp8", "int4"])
    @pytest.mark.parametrize("damage", ["not finite", "short"])
    def test_damaged_contents(self, scheme: str, damage: str, tmp_path: Path) -> None:
        """As `load_model` does, and not at the first picture."""
        sdquant.save(sdquant.load_model(FLUX, scheme, progress=False), tmp_path / "out")
        damage_scale(tmp_path / "out", damage)
        with pytest.raises(sdquant.BadFileError):
            FluxTransformer2DModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)

    def test_no_such_scheme(self) -> None:
        with pytest.raises(sdquant.UnknownQuantError, match="int7"):
            sdquant.Config("int7")

    def test_gguf(self) -> None:
        with pytest.raises(sdquant.IncompatibleError, match="models cannot be quantized to GGUF"):
            FluxTransformer2DModel.from_pretrained(FLUX, quantization_config=sdquant.Config("q8_0"))

    def test_nothing_to_quantize(self) -> None:
        with pytest.raises(sdquant.IncompatibleError, match="no weight that would be quantized"):
            FluxTransformer2DModel.from_pretrained(FLUX, quantization_config=sdquant.Config("int8", skip=["*"]))

    def test_a_config_without_the_weights(self, tmp_path: Path) -> None:
        FluxTransformer2DModel.from_pretrained(FLUX).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "sdquant"}}))
        with pytest.raises(sdquant.BadFileError, match="the file has no sdquant metadata"):
            FluxTransformer2DModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("first", ["diffusers.quantizers", pytest.param("sdquant", marks=pytest.mark.slow)])
def test_registered_whichever_is_imported_first(first: str) -> None:
    second = {"sdquant": "diffusers.quantizers"}.get(first, "sdquant")
    script = f"""
import sys
import {first}
assert "{first}" == "diffusers.quantizers" or "diffusers" not in sys.modules
import {second}
from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING
import sdquant
assert AUTO_QUANTIZATION_CONFIG_MAPPING["sdquant"] is sdquant.Config
assert AUTO_QUANTIZER_MAPPING["sdquant"].__module__.startswith("sdquant.")
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING
assert AUTO_QUANTIZATION_CONFIG_MAPPING["sdquant"] is sdquant.Config
assert AUTO_QUANTIZER_MAPPING["sdquant"].__module__.startswith("sdquant.")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

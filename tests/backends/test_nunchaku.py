"""Nunchaku's files: their order held to its own packer's tensors, and models in it, to what they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sdquant
from sdquant import backends
from sdquant.backends import _nunchaku_find
from sdquant.cli import main
from sdquant.core import PrequantizedWeight, TensorInfo, dtype_name
from sdquant.errors import BadFileError, UnsupportedFileError
from sdquant.nn import quantized, quantized_layer
from sdquant.nn.layer_factory import set_compute

from ..test_load_modes import images
from . import nunchaku_layers as layers
from .comfy_layers import GOLDEN

COMFY = backends.get("comfy")


def _golden(name: str) -> tuple[dict[str, Tensor], PrequantizedWeight]:
    file = load_file(GOLDEN / f"nunchaku_{name}.safetensors")
    infos = {
        key: TensorInfo(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), nbytes=tensor.nbytes)
        for key, tensor in file.items()
    }
    (found,) = _nunchaku_find.find(infos)
    return file, replace(found, details={**found.details, "splits": 6}) if name.startswith("awq") else found


@pytest.mark.parametrize("name", ["svdq_int4", "svdq_int4_unsigned_fc2", "svdq_nvfp4_wcscales", "awq_w4a16_splits6"])
def test_golden(name: str) -> None:
    """Bit for bit the rows that its packer packed; of its float weight half precision is left."""
    file, found = _golden(name)
    packed = COMFY.read(found, None, file.__getitem__)
    weight, theirs = COMFY.decode(packed, torch.float32), file["golden.weight"].float()
    assert (weight - theirs).norm() <= 3e-4 * theirs.norm()
    for part, natural in (("smooth", "smooth_factor"), ("down", "proj_down"), ("up", "proj_up")):
        assert part not in packed.parts or torch.equal(packed.parts[part], file[f"natural.{natural}"])
    low, high = packed.parts["codes"] & 15, packed.parts["codes"] >> 4
    codes = torch.stack((low, high), dim=-1).flatten(1).to(torch.int8)
    shift = 8 if "int4" in name else 0
    assert torch.equal(codes - shift, file["natural.codes"].to(torch.int8))
    bias = backends.nunchaku_bias([found], ["layer.bias"], ["unsigned" in name], file.__getitem__)
    if name.startswith("awq"):
        assert torch.equal(weight, theirs)
        bias = bias.view(6, -1) + torch.tensor([0, 1, 0, 0, 1, 0])[:, None]  # diffusers' blocks add it
        assert torch.equal(bias.view(-1), file["natural.bias"].float())
        return
    floats = nn.Linear(128, 128, dtype=torch.float32)
    floats.bias.data = bias.float()
    layer, x = quantized_layer(floats, packed), file["golden.input"].float().requires_grad_()
    other = copy.deepcopy(layer)
    other.load_state_dict(layer.state_dict())
    out, exact = other(x), file["golden.output_w4a16_f32"]
    assert (out - exact).norm() <= 1e-5 * exact.norm()
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert (gradient - weight.sum(0)).norm() <= 1e-5 * gradient.norm()
    with torch.no_grad():
        set_compute(layer, "int8")
        eight = layer(x.repeat(20, 1))
    assert (eight - exact.repeat(20, 1)).norm() <= 0.02 * eight.norm()


@pytest.mark.parametrize("name", ["svdq_int4", "svdq_nvfp4_wcscales"])
def test_float16_has_room_for_the_sums(name: str) -> None:
    """Of codes, whose scales are about 1e-4: before they were multiplied the sums were infinite."""
    file, found = _golden(name)
    packed = COMFY.read(found, None, file.__getitem__)
    layer = quantized_layer(nn.Linear(128, 128, bias=False, dtype=torch.float16), packed)
    x = torch.randn(70, 128, generator=torch.Generator().manual_seed(1)) * 4
    exact = x @ COMFY.decode(packed, torch.float32).T
    assert (layer(x.half()).float() - exact).norm() <= 5e-3 * exact.norm()


def test_flux_under_the_names_of_the_second_version(flux: Path, tmp_path: Path) -> None:
    """Only the joined layers tell that it is Nunchaku's; what follows a GELU has a bias that was shifted."""
    model = layers.Model(load_file(flux / "transformer" / "diffusion_pytorch_model.safetensors"), names=layers.V2)
    block = "transformer_blocks.0."
    model.svdquant(f"{block}attn.to_qkv", *(f"{block}attn.to_{name}" for name in "qkv"))
    for stream in ("ff", "ff_context"):
        model.svdquant(f"{block}{stream}.net.2", f"{block}{stream}.net.2", shifted=True)
    biases = {key: tensor for key, tensor in model.floats.items() if key.endswith(".net.2.bias")}
    file = model.save(tmp_path / "svdq.safetensors", None)
    values = dict(sdquant.dequantize(file, dtype="float32"))
    assert len(biases) == 2
    for key, tensor in biases.items():
        assert (values[key] - tensor).norm() <= 1e-5 * tensor.norm(), key


@pytest.mark.parametrize("name", ["svdq_int4", "svdq_nvfp4_wcscales"])
def test_the_tests_write_what_its_packer_writes(name: str) -> None:
    file, _ = _golden(name)
    assert torch.equal(layers.codes(file["natural.codes"]), file["layer.qweight"])
    if "nvfp4" in name:
        assert torch.equal(
            layers.small_scales(file["natural.wscales"]).view(torch.uint8), file["layer.wscales"].view(torch.uint8)
        )
        assert torch.equal(layers.vector(file["natural.scale"]), file["layer.wcscales"])
    else:
        assert torch.equal(layers.scales(file["natural.weight_scale"].T.contiguous()), file["layer.wscales"])
        assert torch.equal(layers.vector(file["natural.bias"]), file["layer.bias"])
    assert torch.equal(layers.down(file["natural.proj_down"]), file["layer.lora_down"])
    assert torch.equal(layers.up(file["natural.proj_up"]), file["layer.lora_up"])
    modulation, _ = _golden("awq_w4a16_splits6")
    packed = layers.awq_codes(layers.interleaved(modulation["natural.codes"], 6))
    assert torch.equal(packed, modulation["layer.qweight"])


def _flux(folder: Path, flux: Path, kind: str) -> Path:
    """digits-flux in a single file of Nunchaku's; beside it `floats.safetensors`."""
    weights = load_file(flux / "transformer" / "diffusion_pytorch_model.safetensors")
    config = (flux / "transformer" / "config.json").read_text()
    made = layers.flux(weights, nvfp4=kind == "nvfp4")
    return made.save(folder / f"svdq-{kind}.safetensors", layers.metadata(config, nvfp4=kind == "nvfp4"))


@pytest.fixture(scope="module")
def int4(flux: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _flux(tmp_path_factory.mktemp("int4"), flux, "int4")


@pytest.fixture(scope="module", params=["int4", "nvfp4"])
def model(request: pytest.FixtureRequest, int4: Path, flux: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return int4 if request.param == "int4" else _flux(tmp_path_factory.mktemp("nvfp4"), flux, "nvfp4")


def test_it_is_named(model: Path, flux: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheme = "svdquant_nvfp4" if "nvfp4" in model.name else "svdquant_w4a4"
    for seen in (sdquant.detect(model), sdquant.verify(model)):
        assert (seen.family, seen.quant, seen.class_name) == ("flux", scheme, "FluxTransformer2DModel")
        assert seen.warnings == [] and sum("Nunchaku's" in line for line in seen.evidence) == 2
    assert {row.to_dict()["type"]: row.to_dict()["tensors"] for row in seen.histogram}[scheme] == 17
    plan = sdquant.plan(model, base=flux)
    (part,) = (part for part in plan.components if part.action == "found")
    assert set(part.formats) == {scheme, "awq_w4a16"} and plan.warnings == ()
    assert main(["inspect", str(model)]) == 0
    assert "Nunchaku's SVDQuant" in capsys.readouterr().out


def test_dequantized(model: Path) -> None:
    mine, theirs = dict(sdquant.dequantize(model)), load_file(model.with_name("floats.safetensors"))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (mine[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def test_it_draws_and_is_saved(model: Path, flux: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"base": flux, "dtype": "float32", "progress": False}
    pipe = sdquant.load_model(model, **values)
    mine = dict(quantized(pipe.transformer))
    assert len(mine) == 20 and "single_transformer_blocks.0.proj_out.weight" in mine
    theirs = images(sdquant.load_model(model.with_name("floats.safetensors"), **values), 1)
    drawn = images(pipe, 1)
    assert np.abs(drawn.astype(int) - theirs).max() <= 1
    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", dtype="float32", progress=False)
    assert {name: packed.spec for name, packed in quantized(again.transformer)} == {n: p.spec for n, p in mine.items()}
    assert np.array_equal(images(again, 1), drawn)


@pytest.mark.parametrize("mode", ["sequential", "balanced"])
def test_offloaded(mode: str, model: Path, flux: Path) -> None:
    values: dict[str, Any] = {"base": flux, "dtype": "float32", "progress": False}
    expected = images(sdquant.load_model(model, **values), 1)
    assert np.array_equal(images(sdquant.load_model(model, offload=mode, **values), 1), expected)


def _rewritten(path: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    file = load_file(path)
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    change(file)
    save_file({key: tensor.contiguous() for key, tensor in file.items()}, folder / "changed.safetensors", metadata)
    return folder / "changed.safetensors"


LAYER = "transformer_blocks.0.mlp_fc2."


@pytest.mark.parametrize(
    ("key", "change", "word"),
    [
        ("wscales", None, r"no 'transformer_blocks\.0\.mlp_fc2\.wscales'"), ("lora_up", None, "no .*lora_up"),
        ("qweight", lambda t: t[:, :-1], "tiles of 128 outputs"), ("wscales", lambda t: t[1:], "belongs to the weight"),
        ("smooth", lambda t: t[1:], "belongs to the weight"), ("smooth", lambda t: t * 0, "not positive"),
        ("lora_down", lambda t: t[:, 1:], "multiples of 16"), ("lora_up", lambda t: t * torch.nan, "not a number"),
        ("bias", lambda t: t[1:], "not the bias of its weight"),
    ],
)  # fmt: skip
def test_what_is_damaged(
    key: str, change: Callable[[Tensor], Tensor] | None, word: str, int4: Path, tmp_path: Path
) -> None:
    def damage(file: dict[str, Tensor]) -> None:
        tensor = file.pop(LAYER + key)
        if change is not None:
            file[LAYER + key] = change(tensor)

    with pytest.raises(BadFileError, match=word):
        sdquant.verify(_rewritten(int4, tmp_path, damage))


def test_what_nothing_tells(int4: Path, tmp_path: Path) -> None:
    def strange(file: dict[str, Tensor]) -> None:
        """A model that has no rows: its layers may be shifted or not."""
        for key in list(file):
            file[key.replace("_blocks.0.", "_blocks.0.part.")] = file.pop(key)

    with pytest.raises(UnsupportedFileError, match="nothing tells whether its rows are interleaved"):
        sdquant.detect(_rewritten(int4, tmp_path, strange))

    def without(file: dict[str, Tensor]) -> None:
        del file[f"{LAYER}bias"]

    with pytest.raises(UnsupportedFileError, match="no bias that was made for that"):
        sdquant.detect(_rewritten(int4, tmp_path, without))


def test_empty_and_strange_tensors(int4: Path, tmp_path: Path) -> None:
    def empty(file: dict[str, Tensor]) -> None:
        file["transformer_blocks.0.qkv_proj.qweight"] = torch.empty(0, 128, dtype=torch.int8)

    with pytest.raises(UnsupportedFileError, match=r"Nunchaku.*qkv_proj"):
        sdquant.detect(_rewritten(int4, tmp_path, empty))

    def more(file: dict[str, Tensor]) -> None:
        file["transformer_blocks.0.qkv_proj.alpha"] = torch.tensor(1.0)

    assert sdquant.detect(_rewritten(int4, tmp_path, more)).quant == "svdquant_w4a4"


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        ("qkv_proj", lambda t: torch.tensor(1.0, dtype=t.dtype)),
        ("qkv_proj", lambda t: t.repeat(2)),
        ("qkv_proj", lambda t: t[:-128]),
        ("norm1.linear", lambda t: t.view(2, -1)),
        ("qkv_proj", lambda t: t.to(torch.int16)),
    ],
)
def test_a_damaged_bias(layer: str, change: Callable[[Tensor], Tensor], int4: Path, tmp_path: Path) -> None:
    """Of layers in one: each takes its rows of the file's, and none may take those of another's length."""
    path, key = tmp_path / "model.safetensors", f"transformer_blocks.0.{layer}.bias"
    tensors = load_file(int4)
    with safe_open(int4, "pt") as file:
        save_file(tensors | {key: change(tensors[key]).contiguous()}, path, file.metadata())
    with pytest.raises(BadFileError, match=rf"{layer}\.bias.* not the bias of its weight"):
        sdquant.verify(path)
    with pytest.raises(BadFileError, match="not the bias of its weight"):
        dict(sdquant.dequantize(path))

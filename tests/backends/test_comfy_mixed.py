"""A file with a format for each layer: detect, inspect, plan and verify name each, and it draws what they draw."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfy_kitchen.tensor import (
    AsymW4A8Int8Layout,
    TensorCoreConvRotW4A4Layout,
    TensorCoreMXFP8Layout,
    TensorCoreNVFP4Layout,
    TensorWiseINT8Layout,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdquant
from sdquant.cli import main
from sdquant.errors import BadFileError
from sdquant.nn import quantized

from ..test_load_modes import images
from .comfy_layers import line

Layer = tuple[dict[str, Tensor], dict[str, Any], Tensor]  # its tensors, what is said of it, its weight as floats


def _nvfp4(weight: Tensor) -> Layer:
    codes, four = TensorCoreNVFP4Layout.quantize(weight)
    file = {"weight": codes, "weight_scale": four.block_scale, "weight_scale_2": four.scale}
    return file, {"format": "nvfp4"}, TensorCoreNVFP4Layout.dequantize(codes, four)


def _mxfp8(weight: Tensor) -> Layer:
    codes, eight = TensorCoreMXFP8Layout.quantize(weight)
    file = {"weight": codes, "weight_scale": eight.scale}
    return file, {"format": "mxfp8"}, TensorCoreMXFP8Layout.dequantize(codes, eight)


def _int8(weight: Tensor) -> Layer:
    options: dict[str, Any] = {"convrot": True, "convrot_groupsize": 64}
    codes, eight = TensorWiseINT8Layout.quantize(weight, per_channel=True, **options)
    file = {"weight": codes, "weight_scale": eight.scale}
    return file, {"format": "int8_tensorwise", **options}, TensorWiseINT8Layout.dequantize(codes, eight)


def _w4a8(weight: Tensor) -> Layer:
    codes, four = AsymW4A8Int8Layout.quantize(weight, convrot_groupsize=64)
    file = {"weight": codes, "weight_s_rel": four.scale, "weight_s_channel": four.s_channel}
    file["weight_codebook"] = four.codebook  # type: ignore[assignment]
    said = {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 64}
    return file, said, AsymW4A8Int8Layout.dequantize(codes, four)


def _fp8(weight: Tensor) -> Layer:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, {"format": "float8_e4m3fn"}, codes.float() * scale


def _w4a4(weight: Tensor) -> Layer:
    codes, four = TensorCoreConvRotW4A4Layout.quantize(weight, convrot_groupsize=64)
    said = {"format": "convrot_w4a4", "convrot_groupsize": 64}
    return {"weight": codes, "weight_scale": four.scale}, said, TensorCoreConvRotW4A4Layout.dequantize(codes, four)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes in bytes, the even column in the low half: int8."""
    low, high = codes.to(torch.uint8)[:, ::2] & 15, codes.to(torch.uint8)[:, 1::2] & 15
    return (low | high << 4).view(torch.int8)


def _svdquant(weight: Tensor) -> Layer:
    """By its formula: comfy-kitchen reads such layers, and does not make them."""
    smooth = weight.abs().amax(0).clamp(min=1e-3).sqrt()
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    up, down = u[:, :8] * s[:8], v[:8].T.contiguous()
    residual = ((weight - up @ down.T) * smooth).view(len(weight), -1, 64)
    scale = residual.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 7
    codes = (residual / scale).round().clamp(-7, 7)
    file = {
        "weight": _nibbles(codes.flatten(1).to(torch.int8)), "weight_scale": scale.squeeze(-1).T,
        "smooth_factor": smooth, "proj_down": down, "proj_up": up,
    }  # fmt: skip
    said = {"format": "svdquant_w4a4", "act_unsigned": False}
    return file, said, (codes * scale).flatten(1) / smooth + up @ down.T


def _awq(weight: Tensor) -> Layer:
    groups = weight.view(len(weight), -1, 64)
    zero = groups.mean(-1, keepdim=True)
    scale = (groups - zero).abs().amax(-1, keepdim=True).clamp(min=1e-8) / 7
    codes = ((groups - zero) / scale).round().clamp(-8, 7)
    file = {
        "weight": _nibbles((codes + 8).flatten(1)), "weight_scale": scale.squeeze(-1).T,
        "weight_zero": zero.squeeze(-1).T,
    }  # fmt: skip
    return file, {"format": "awq_w4a16"}, (codes * scale + zero).flatten(1)


KINDS: dict[str, Callable[[Tensor], Layer]] = {
    "comfy:nvfp4": _nvfp4, "mxfp8": _mxfp8, "int8_convrot": _int8, "w4a8": _w4a8, "fp8": _fp8, "w4a4": _w4a4,
    "svdquant_w4a4": _svdquant, "awq_w4a16": _awq,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file, and one of its weights as floats."""
    folder = tmp_path_factory.mktemp("mixed")
    file: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    weights = load_file(sdquant.demo.path("digits-flux") / "transformer" / "diffusion_pytorch_model.safetensors")
    turns = 0
    for name, tensor in weights.items():
        if tensor.ndim < 2 or any(size % 64 for size in tensor.shape):
            file[name] = floats[name] = tensor
            continue
        stem, kind = name.removesuffix("weight"), list(KINDS)[turns % len(KINDS)]
        tensors, said, floats[name] = KINDS[kind](tensor.float())
        file |= {stem + key: part for key, part in tensors.items()} | {f"{stem}comfy_quant": line(said)}
        turns += 1
    save_file({name: tensor.contiguous() for name, tensor in file.items()}, folder / "mixed.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, folder / "floats.safetensors")
    return folder / "mixed.safetensors", folder / "floats.safetensors"


def test_each_is_named(mixed: tuple[Path, Path], flux: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seen in (sdquant.detect(mixed[0]), sdquant.verify(mixed[0])):
        assert {row.to_dict()["type"] for row in seen.histogram} == {*KINDS, "bfloat16"}
        assert len(seen.evidence) == 1 + len(KINDS) and seen.warnings == []
    plan = sdquant.plan(mixed[0], base=flux)
    (part,) = (part for part in plan.components if part.action == "found")
    assert set(part.formats) == set(KINDS) and part.formats[0] == part.scheme
    assert {weight.scheme for weight in part.weights} == set(KINDS) and plan.warnings == ()
    assert main(["plan", str(mixed[0]), "--base", "digits-flux"]) == 0
    assert f"{', '.join(part.formats)}, as found" in capsys.readouterr().out
    assert main(["plan", str(mixed[0]), "--base", "digits-flux", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["components"]
    assert [row["formats"] for row in rows if row["action"] == "found"] == [list(part.formats)]
    assert main(["inspect", str(mixed[0])]) == 0
    printed = capsys.readouterr().out
    assert all(kind in printed for kind in KINDS)


def test_it_draws_and_is_saved(mixed: tuple[Path, Path], flux: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"base": flux, "dtype": "float32", "progress": False}
    pipe = sdquant.load_model(mixed[0], **values)
    mine = dict(quantized(pipe.transformer))
    assert {packed.spec.scheme.name for packed in mine.values()} == set(KINDS)
    theirs = images(sdquant.load_model(mixed[1], **values), 1)
    assert np.abs(images(pipe, 1).astype(int) - theirs).max() <= 1
    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", dtype="float32", progress=False)
    assert {name: packed.spec for name, packed in quantized(again.transformer)} == {n: p.spec for n, p in mine.items()}
    assert np.array_equal(images(again, 1), images(pipe, 1))


@pytest.mark.parametrize("mode", ["sequential", "balanced"])
def test_offloaded(mode: str, mixed: tuple[Path, Path], flux: Path) -> None:
    values: dict[str, Any] = {"base": flux, "dtype": "float32", "progress": False}
    expected = images(sdquant.load_model(mixed[0], **values), 1)
    assert np.array_equal(images(sdquant.load_model(mixed[0], offload=mode, **values), 1), expected)


def test_one_layer_that_lacks_a_part(mixed: tuple[Path, Path], tmp_path: Path) -> None:
    file = load_file(mixed[0])
    for ending in ("weight_scale", "weight_scale_2", "weight_s_rel", "weight_s_channel", "proj_up", "weight_zero"):
        key = next(key for key in file if key.endswith(f".{ending}"))
        save_file({name: tensor for name, tensor in file.items() if name != key}, tmp_path / "damaged.safetensors")
        with pytest.raises(BadFileError, match=key.replace(".", r"\.")):
            sdquant.detect(tmp_path / "damaged.safetensors")

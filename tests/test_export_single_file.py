"""One safetensors file for Forge and ComfyUI: read by their rules, and the same weights when sdquant loads it."""

from __future__ import annotations

import dataclasses
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfy_kitchen.tensor import TensorCoreFP8Layout
from safetensors.torch import load_file, save_file

import sdquant
from sdquant.cli import main
from sdquant.errors import BadFileError, DiskSpaceError, IncompatibleError, SettingsError
from sdquant.models.pipelines import main_part
from sdquant.nn.weights import plain, quantized
from sdquant.saving import export_single_file
from sdquant.saving.export_gguf import quantize_file

from . import comfy_safetensors, layouts
from .test_load_modes import images

# A layer under the name that other tools know the model by.
MODELS = [("digits-sd", "input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"),
          ("digits-flux", "double_blocks.0.img_attn.qkv.weight")]  # fmt: skip
# How far a decoded weight is from what it was, as a share of it; bfloat16 weights of the shipped models.
ERROR = {"nf4": 0.12, "fp4": 0.15, "fp8": 0.05, "qint8": 0.02, "int8_row": 0.02,
         "int8_tensor": 0.05, "int8_convrot": 0.02, "mxfp8": 0.05, "comfy:nvfp4": 0.15,
         "w4a8": 0.12, "w6a8": 0.04, "w4a4": 0.2, "svdquant_w4a4": 0.12}  # fmt: skip

# Other schemes write the same format, whose files do not say which.
READ_AS = {"qint8": "int8_row"}


@pytest.mark.parametrize(("model", "layer"), MODELS)
@pytest.mark.parametrize("scheme", export_single_file.SCHEMES)
def test_other_tools_read_it_and_sdquant_the_same(
    scheme: str, model: str, layer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"model-{scheme}.safetensors"
    assert main(["quantize", model, str(file), "-q", scheme]) == 0
    capsys.readouterr()
    floats, packed = comfy_safetensors.read(file)
    narrow = model == "digits-sd" and scheme in ("w4a4", "svdquant_w4a4")  # whose layer has 32 inputs
    assert layer in packed or narrow
    assert len(packed) > 10 or (narrow and scheme != "w4a4" and packed)
    seen = sdquant.verify(file)
    assert (seen.quant, seen.warnings) == (READ_AS.get(scheme, scheme), [])

    base = sdquant.demo.path(model)
    pipe = sdquant.load_model(file, base=base, progress=False)
    assert np.isfinite(images(pipe, 1)).all()
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, tmp_path / "floats.safetensors")
    theirs = plain(main_part(sdquant.load_model(tmp_path / "floats.safetensors", base=base, progress=False)))
    mine, original = dict(quantized(main_part(pipe))), plain(main_part(sdquant.load_model(base, progress=False)))
    assert len(mine) >= len(packed)
    for name, part in mine.items():
        weight = part.spec.scheme.codec.decode(part, torch.bfloat16)
        if (
            part.spec.rotation or "down" in part.parts
        ):  # sums in another order than comfy-kitchen's: now and then the last bit
            few = scheme.startswith(("w4", "w6"))  # values, among which are many ties
            assert (weight != theirs[name]).float().mean() < (5e-2 if few else 5e-3), name
            # One last bit of a large value is already 2e-4 of the norm of a small layer.
            assert (weight.float() - theirs[name].float()).norm() < 1e-3 * weight.float().norm(), name
        else:
            assert torch.equal(weight, theirs[name]), name
        wide = original[name].float()
        assert (weight.float() - wide).norm() < ERROR[scheme] * wide.norm(), name
    for name, tensor in plain(main_part(pipe)).items():
        assert torch.equal(tensor, original[name]), name


def test_it_loads_alone(tmp_path: Path) -> None:
    file = export_single_file.quantize_file(sdquant.demo.path("digits-flux"), "qint8", tmp_path / "f.safetensors")
    alone = sdquant.load_model(file, progress=False)
    assert type(alone).__name__ == "FluxTransformer2DModel" and dict(quantized(alone))


@pytest.mark.parametrize("scheme", ["fp8_scaled", "qint8"])
def test_a_text_encoder(scheme: str, flux: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"t5-{scheme}.safetensors"
    assert main(["quantize", "digits-flux", str(file), "-q", scheme, "--components", "text_encoder_2"]) == 0
    capsys.readouterr()
    floats, packed = comfy_safetensors.read(file)
    assert packed and all(name.startswith("encoder.block.") for name in packed)
    pipe = sdquant.load_model(file, base=flux, progress=False)
    mine = dict(quantized(pipe.text_encoder_2))
    for name, part in mine.items():
        assert torch.equal(part.spec.scheme.codec.decode(part, torch.float32), floats[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scaled_fp8_is_that_of_comfy_kitchen(dtype: torch.dtype, tmp_path: Path) -> None:
    """Codes and scale, bit for bit as it makes them of the weight in float32."""
    generator = torch.Generator().manual_seed(3)
    weights = {f"blocks.{i}.fc.weight": torch.randn(300, 512, generator=generator).to(dtype) for i in range(2)}
    weights["blocks.1.fc.weight"][3, 5] = 40
    save_file(weights | {"blocks.2.fc.weight": torch.full((64, 64), 1e-38)}, tmp_path / "in.safetensors")
    export_single_file.quantize_file(tmp_path / "in.safetensors", "fp8_scaled", tmp_path / "out.safetensors")
    made = load_file(tmp_path / "out.safetensors")
    for name, weight in weights.items():
        codes, params = TensorCoreFP8Layout.quantize(weight.float())
        assert torch.equal(made[name].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(made[name.replace("weight", "scale_weight")].view(()), params.scale)
    assert made["blocks.2.fc.weight"].float().isfinite().all()  # of weights whose scale has no reciprocal


def test_a_checkpoint_gives_its_unet(sd: Path, tmp_path: Path) -> None:
    checkpoint = layouts.checkpoint(sd, tmp_path / "digits-v1.safetensors")
    one = export_single_file.quantize_file(checkpoint, "nf4", tmp_path / "one-nf4.safetensors", progress=False)
    two = export_single_file.quantize_file(sd, "nf4", tmp_path / "two-nf4.safetensors", progress=False)
    mine, others = load_file(one), load_file(two)
    assert mine.keys() == others.keys()
    assert all(torch.equal(tensor, others[key]) for key, tensor in mine.items())


def test_skip_and_components(flux: Path, tmp_path: Path) -> None:
    file = export_single_file.quantize_file(
        flux, "fp8", tmp_path / "f.safetensors", skip=("transformer_blocks", "single_transformer_blocks")
    )
    _, packed = comfy_safetensors.read(file)
    assert packed == set()
    with pytest.raises(SettingsError, match="one file holds exactly one component"):
        export_single_file.quantize_file(
            flux, "fp8", tmp_path / "g.safetensors", components=("transformer", "text_encoder")
        )


def test_nothing_to_quantize(tmp_path: Path) -> None:
    """A LoRA's or an embedding's file, say; whole numbers that are called a weight are codes (test_entry_points.py)."""
    save_file({"a.bias": torch.ones(64), "position_ids": torch.arange(64)[None]}, tmp_path / "in.safetensors")
    for write, scheme in (
        (export_single_file.quantize_file, "nf4"),
        (quantize_file, "q8_0"),
        (quantize_file, "q4_k_m"),
    ):
        with pytest.raises(IncompatibleError, match="no weight that would be quantized"):
            write(
                tmp_path / "in.safetensors", scheme, tmp_path / f"out.{'gguf' if scheme[0] == 'q' else 'safetensors'}"
            )
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_what_is_refused(sd: Path, tmp_path: Path, capsys: Any) -> None:
    file = export_single_file.quantize_file(sd, "nf4", tmp_path / "model-nf4.safetensors")
    with pytest.raises(SettingsError, match="exists"):
        export_single_file.quantize_file(sd, "nf4", file)
    for flag in (["--dtype", "float32"], ["--mode", "post"], ["--base", "digits-sd"], ["--runtime", "plain"]):
        for target in ("x.safetensors", "x.gguf"):
            scheme = "q8_0" if target.endswith("gguf") else "nf4"
            assert main(["quantize", "digits-sd", str(tmp_path / target), "-q", scheme, *flag]) == 2
            assert flag[0] in capsys.readouterr().err
    assert not (tmp_path / "x.safetensors").exists() and not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("scheme", export_single_file.SCHEMES)
def test_room_is_looked_for_before_the_work(scheme: str, flux: Path, tmp_path: Path, monkeypatch: Any) -> None:
    free, asked = shutil.disk_usage(tmp_path), []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: free._replace(free=1_000_000))
    monkeypatch.setattr(export_single_file.original_layout, "read", lambda *values: asked.append(values))
    with pytest.raises(DiskSpaceError, match="1000000 are free"):
        export_single_file.quantize_file(flux, scheme, tmp_path / "f.safetensors")
    assert asked == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", export_single_file.SCHEMES)
def test_a_weight_that_is_not_a_number(scheme: str, sd: Path, tmp_path: Path) -> None:
    tensors = layouts.weights(sd / "unet")
    name = next(name for name in tensors if name.endswith("attn1.to_q.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, tmp_path / "unet.safetensors")
    with pytest.raises(BadFileError, match=r"attn1\.to_q"):
        export_single_file.quantize_file(tmp_path / "unet.safetensors", scheme, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("scheme", export_single_file.SCHEMES)
def test_one_weight_is_held_at_a_time(scheme: str, flux: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Not the quantized model either: the header is written before there is any of it."""
    seen: list[weakref.ref[Any]] = []
    real, row = export_single_file.original_layout.read, export_single_file.SCHEMES[scheme]

    def held(value: Any) -> Any:
        seen.append(weakref.ref(value))
        return value

    def read(*values: Any) -> Any:
        assert not any(ref() is not None for ref in seen)
        return held(real(*values))

    monkeypatch.setattr(export_single_file.original_layout, "read", read)
    packing = dataclasses.replace(row, encode=lambda *values: held(row.encode(*values)))
    monkeypatch.setattr(export_single_file, "SCHEMES", {scheme: packing})
    export_single_file.quantize_file(flux, scheme, tmp_path / "f.safetensors", progress=False)
    assert len(seen) > 50 and sdquant.verify(tmp_path / "f.safetensors").quant == READ_AS.get(scheme, scheme)


def test_options_and_other_schemes_are_written_as_before() -> None:
    assert all(export_single_file.suits(scheme) for scheme in ("nf4", "bnb:nf4", "FP8", "qint8"))
    for scheme in ("nf4,double_quant", "nf4,embeddings", "fp8,packing=blockwise", "int8", "q8_0", "none"):
        assert not export_single_file.suits(scheme)

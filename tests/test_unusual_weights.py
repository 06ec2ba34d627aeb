"""What cannot be quantized well is refused by its name; what is odd but sound goes through every codec."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import backends, demo
from sdquant.core.backend import Unfit
from sdquant.models.quantize_weight import encode
from sdquant.saving import export_gguf, export_single_file

SCHEMES = [row.name for row in backends.schemes() if row.on_the_fly]
READ_AS = {"qint8": "int8_row"}  # which look the same in a single file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", [*SCHEMES, "nf4,double_quant", "fp8,packing=float8"])
def test_a_value_that_is_not_finite_names_its_layer(scheme: str, value: float, dtype: torch.dtype) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    encode("sound", weight, backends.parse(scheme))
    weight[17, 200] = value
    with pytest.raises(sdquant.BadFileError, match=r"'blocks\.3\.proj\.weight'") as caught:
        encode("blocks.3.proj.weight", weight, backends.parse(scheme))
    assert "skip='blocks.3.proj'" in caught.value.fix


@pytest.mark.parametrize("mode", ["pre", "post"])
def test_of_a_file(mode: str, tmp_path: Path) -> None:
    source = demo.path("digits-flux") / "transformer"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    state = load_file(source / "diffusion_pytorch_model.safetensors")
    name = "single_transformer_blocks.0.proj_mlp.weight"
    state[name][5, 5] = math.nan
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(sdquant.BadFileError, match=name):
        sdquant.load_model(tmp_path, "nf4", mode=mode, progress=False)
    sdquant.load_model(tmp_path, "nf4", mode=mode, skip=["single_transformer_blocks.0.proj_mlp"], progress=False)


@pytest.mark.parametrize(
    ("name", "value"), [("up_blocks.0.resnets.0.norm1.bias", math.nan), ("conv_in.weight", -math.inf)]
)
def test_what_stays_a_float_is_looked_at_too(name: str, value: float, tmp_path: Path) -> None:
    """Whether the model is loaded or written: a broken norm breaks every picture. In GGUF nothing showed a NaN."""
    source = demo.path("digits-sd") / "unet"
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text((source / "config.json").read_text())
    state = load_file(source / "diffusion_pytorch_model.safetensors")
    state[name].view(-1)[5] = value
    save_file(state, tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    for mode in ("pre", "post"):
        with pytest.raises(sdquant.BadFileError, match=re.escape(name)):
            sdquant.load_model(tmp_path / "unet", "nf4", mode=mode, progress=False)
        sdquant.load_model(tmp_path / "unet", "nf4", mode=mode, skip=[name.rpartition(".")[0]], progress=False)
    for scheme in ("f16", "q8_0"):
        with pytest.raises(sdquant.BadFileError, match=re.escape(name)):
            export_gguf.quantize_file(tmp_path / "unet", scheme, tmp_path / "out.gguf", progress=False)
    with pytest.raises(sdquant.BadFileError, match=re.escape(name)):
        export_gguf.quantize_file(tmp_path / "unet", "q8_0", tmp_path / "out", progress=False)
    for scheme in export_single_file.SCHEMES:
        with pytest.raises(sdquant.BadFileError, match=re.escape(name)):
            export_single_file.quantize_file(tmp_path / "unet", scheme, tmp_path / "out.safetensors", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["unet"]


@pytest.mark.parametrize("scheme", [row.name for row in backends.get("gguf").schemes])
def test_gguf_types_take_no_nan(scheme: str) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    backends.get("gguf").encode(weight, backends.parse(scheme))
    weight[17, 200] = math.nan
    with pytest.raises(Unfit, match="NaN"):
        backends.get("gguf").encode(weight, backends.parse(scheme))


def test_tensors_without_numbers(tmp_path: Path) -> None:
    """They are written as they are; GGUF has none."""
    save_file(
        {"a.weight": torch.zeros(0, 64), "b.weight": torch.zeros(64, 0), "c.weight": torch.ones(256, 64)},
        tmp_path / "in.safetensors",
    )
    for scheme in export_single_file.SCHEMES:
        out = export_single_file.quantize_file(tmp_path / "in.safetensors", scheme, tmp_path / f"{scheme}.safetensors")
        assert sdquant.verify(out).quant == READ_AS.get(scheme, scheme)
        assert load_file(out)["a.weight"].shape == (0, 64)
    with pytest.raises(sdquant.UnsupportedFileError, match=r"'a\.weight' has shape \[0, 64\]"):
        export_gguf.quantize_file(tmp_path / "in.safetensors", "q8_0", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("kind", ["zero", "zero row", "constant row", "denormal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_odd_weights_in_files_for_other_tools(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    shapes = ((1, 1), (7, 13), (5, 33), (1, 64), (64, 256))
    save_file(
        {f"{n}.weight": odd(kind, shape).to(dtype) for n, shape in enumerate(shapes)}, tmp_path / "in.safetensors"
    )
    for scheme in export_single_file.SCHEMES:
        out = export_single_file.quantize_file(tmp_path / "in.safetensors", scheme, tmp_path / f"{scheme}.safetensors")
        assert sdquant.verify(out).quant == READ_AS.get(scheme, scheme)
    for scheme in ("q8_0", "q4_k_m"):
        sdquant.verify(export_gguf.quantize_file(tmp_path / "in.safetensors", scheme, tmp_path / f"{scheme}.gguf"))


def odd(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(0.05)
    if kind == "zero":
        weight.zero_()
    elif kind == "zero row":
        weight[0] = 0
    elif kind == "constant row":
        weight[0] = 0.25
    elif kind == "denormal":
        weight.fill_(1e-40)
    return weight


@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (5, 33), (1, 64), (16, 33, 3, 3), (64, 256)], ids=str)
@pytest.mark.parametrize("kind", ["zero", "zero row", "constant row", "denormal", "random"])
@pytest.mark.parametrize("scheme", [row.name for row in backends.schemes()])
def test_odd_weights_give_no_nan(scheme: str, kind: str, shape: tuple[int, ...]) -> None:
    weight, spec = odd(kind, shape), backends.parse(scheme)
    backend = backends.get(spec.scheme.backend)
    for dtype in (torch.float32, torch.bfloat16):
        try:
            packed = encode("odd.weight", weight.to(dtype), spec)
        except Unfit as unfit:
            assert str(unfit)  # says why; the plan keeps such a weight as it is
            continue
        back = backend.decode(packed, torch.float32)
        assert back.shape == weight.shape and bool(torch.isfinite(back).all())
        if kind in ("zero", "zero row"):
            assert float(back[0].abs().max()) < 1e-4

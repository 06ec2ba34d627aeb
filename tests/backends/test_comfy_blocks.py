"""ComfyUI's NVFP4 and MXFP8, whose scales lie in tiles: held to comfy-kitchen's own tensors, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfy_kitchen.tensor import TensorCoreMXFP8Layout, TensorCoreNVFP4Layout
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sdquant
from sdquant import backends
from sdquant.core import Cut, Packed, packed_rows, read_weight
from sdquant.errors import BadFileError, ConflictError, IncompatibleError, SettingsError, UnknownQuantError
from sdquant.formats.checkpoint import single_file
from sdquant.kernels import dispatch
from sdquant.models.weight_loader import read_packed
from sdquant.nn import quantized, quantized_layer
from sdquant.saving.export_gguf import quantize_file

from ..test_load_modes import images
from .comfy_layers import GOLDEN, read, write

COMFY = backends.get("comfy")
SHAPES = [(128, 256), (300, 160), (8, 72), (33, 7), (1, 16)]


def _weight(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 0.05
    weight[0, : min(32, shape[1] // 2)] = 0
    return weight.to(dtype)


def _theirs(scheme: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of comfy-kitchen, and its own dequantized weight: float32."""
    rows, columns = weight.shape
    if scheme == "mxfp8":
        codes, eight = TensorCoreMXFP8Layout.quantize(weight.float())
        floats = TensorCoreMXFP8Layout.dequantize(codes, eight)
        return {"weight": codes, "weight_scale": eight.scale}, floats[:rows, :columns]
    codes, four = TensorCoreNVFP4Layout.quantize(weight.float())
    floats = TensorCoreNVFP4Layout.dequantize(codes, four)
    file = {"weight": codes, "weight_scale": four.block_scale, "weight_scale_2": four.scale}
    return file, floats[:rows, :columns]


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def _format(scheme: str) -> dict[str, str]:
    return {"format": scheme.removeprefix("comfy:")}


@pytest.mark.parametrize("name", ["comfy_mxfp8", "comfy_nvfp4_padded"])
def test_golden(name: str) -> None:
    file = load_file(GOLDEN / f"{name}.safetensors")
    source, theirs = file["golden.source"], file["golden.weight"]
    packed = read(GOLDEN / f"{name}.safetensors", tuple(source.shape))
    mine = COMFY.decode(packed, torch.float32)
    assert torch.equal(mine, theirs)
    if name == "comfy_mxfp8":
        again = COMFY.encode(source, backends.parse("mxfp8"))
        assert all(_is_equal(part, again.parts[key]) for key, part in packed.parts.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["comfy:nvfp4", "mxfp8"])
def test_what_is_made_is_that_of_comfy_kitchen(
    scheme: str, shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    weight = _weight(shape, dtype)
    file, floats = _theirs(scheme, weight)
    packed = COMFY.encode(weight, backends.parse(scheme))
    written = backends.comfy.BACKEND.export("proj.weight", packed)
    assert written.keys() - {"proj.comfy_quant"} == {f"proj.{key}" for key in file}
    assert all(_is_equal(written[f"proj.{key}"], tensor) for key, tensor in file.items())

    for metadata in (False, True):
        path = write(tmp_path, _format(scheme), file, metadata)
        seen = sdquant.verify(path)
        assert (seen.quant, seen.backend, seen.warnings) == (scheme, "comfy", [])
        back = read(path, shape)
        assert all(_is_equal(part, packed.parts[key]) for key, part in back.parts.items())
        assert back.spec.details == packed.spec.details
        assert torch.equal(COMFY.decode(back, torch.float32), floats)
    if shape[0] > 1:
        some = COMFY.decode(packed_rows.cut(back, [(1, shape[0] - 1)]), torch.float32)
        assert torch.equal(some, COMFY.decode(back, torch.float32)[1 : shape[0] - 1])


@pytest.mark.parametrize("scheme", ["comfy:nvfp4", "mxfp8"])
def test_parts_of_a_weight_whose_padding_only_the_model_tells(scheme: str, tmp_path: Path) -> None:
    """Mochi's `w1` has 680 rows, which is no multiple of 16 or 32, and no bias; diffusers has each half of it."""
    weight = _weight((680, 64), torch.bfloat16)
    file, floats = _theirs(scheme, weight)
    path = write(tmp_path, _format(scheme), file)
    (stored,) = single_file(path).prequantized.values()
    padded = file["weight"].shape[0]
    assert padded > 680
    for begin in (0, 1):
        rows = ((begin * padded // 2, (begin + 1) * padded // 2),)
        half = replace(stored, name="half.weight", cut=Cut(of=stored, shape=(padded, 64), rows=rows, nbytes=0))
        packed = read_packed(half, None, (340, 64), load_file(path).__getitem__)
        assert packed.spec.shape == (340, 64)
        assert torch.equal(COMFY.decode(packed, torch.float32), floats[340 * begin : 340 * (begin + 1)])
    with pytest.raises(BadFileError, match=r"has shape \[\d+, 64\] in the file, but the model expects \[300, 64\]"):
        read_packed(half, None, (300, 64), load_file(path).__getitem__)


@pytest.mark.parametrize("metadata", [False, True])
def test_hybrid_mxfp8_of_convert_to_quant(metadata: bool, tmp_path: Path) -> None:
    """One more scale, by which cards without MXFP8 would take the weight: it is the blocks' that are exact."""
    file, floats = _theirs("mxfp8", _weight((40, 96)))
    path = write(tmp_path, {"format": "hybrid_mxfp8"}, {**file, "weight_scalar": torch.tensor(0.5)}, metadata)
    assert (sdquant.verify(path).quant, sdquant.verify(path).warnings) == ("mxfp8", [])
    assert torch.equal(COMFY.decode(read(path, (40, 96)), torch.float32), floats)


@pytest.mark.parametrize("scheme", ["comfy:nvfp4", "mxfp8"])
def test_kernels_read_it(scheme: str) -> None:
    packed = COMFY.encode(_weight((64, 256)), backends.parse(scheme))
    reader = dispatch.way(COMFY, packed, COMFY.form(packed), torch.bfloat16).reader
    assert (reader is None) is (not dispatch.readers("cpu"))


def test_columns_that_are_multiplied(tmp_path: Path) -> None:
    """`pre_quant_scale`: activations are multiplied by it, which is the same as the weight's columns."""
    file, floats = _theirs("comfy:nvfp4", _weight((32, 64)))
    path = write(tmp_path, {"format": "nvfp4"}, {**file, "pre_quant_scale": torch.linspace(0.5, 2, 64)})
    packed = read(path, (32, 64))
    assert torch.allclose(COMFY.decode(packed, torch.float32), floats * torch.linspace(0.5, 2, 64), rtol=1e-6)
    layer = quantized_layer(nn.Linear(64, 32, bias=False), packed, torch.float32)
    x = torch.randn(5, 64)
    assert torch.allclose(layer(x), x @ COMFY.decode(packed, torch.float32).T, atol=1e-5)


def test_a_state_dict_has_the_factor() -> None:
    one, other = (
        quantized_layer(nn.Linear(64, 32), COMFY.encode(_weight((32, 64)) * size, backends.parse("comfy:nvfp4")))
        for size in (1, 3)
    )
    whole = copy.deepcopy(one)
    whole.load_state_dict(other.state_dict())
    assert torch.equal(whole.dequantize(), other.dequantize()) and whole.spec == other.spec
    floats = {"weight": _weight((32, 64)) * 3, "bias": torch.zeros(32)}
    whole = copy.deepcopy(one)
    whole.load_state_dict(floats)
    assert torch.equal(whole.dequantize(), other.dequantize())
    whole = copy.deepcopy(one)
    whole.weight = floats["weight"]
    assert torch.equal(whole.dequantize(), other.dequantize())


def _edited(scheme: str, **changes: Callable[[Tensor], Tensor] | None) -> dict[str, Tensor]:
    file, _ = _theirs(scheme, _weight((32, 64)))
    for key, change in changes.items():
        if change is None:
            del file[key]
        else:
            file[key] = change(file[key])
    return file


@pytest.mark.parametrize(
    ("scheme", "changes", "word"),
    [
        ("comfy:nvfp4", {"weight_scale": None}, r"it has no 'proj\.weight_scale'"),
        ("comfy:nvfp4", {"weight_scale_2": None}, r"it has no 'proj\.weight_scale_2'"),
        ("mxfp8", {"weight_scale": None}, r"it has no 'proj\.weight_scale'"),
        ("comfy:nvfp4", {"weight_scale": lambda t: t[:64]}, "in tiles of 128 x 4"),
        ("mxfp8", {"weight_scale": lambda t: t[:, :2]}, "in tiles of 128 x 4"),
        ("comfy:nvfp4", {"weight_scale": lambda t: t.float()}, "E4M3"),
        ("mxfp8", {"weight_scale": lambda t: t.float()}, "E8M0"),
        ("mxfp8", {"weight_scale": lambda t: torch.full_like(t.view(torch.uint8), 255)}, "not a number"),
        ("comfy:nvfp4", {"weight_scale": lambda t: torch.full_like(t.view(torch.uint8), 127)}, "not a number"),
        ("comfy:nvfp4", {"weight_scale_2": lambda t: t * torch.nan}, "not a number"),
        ("comfy:nvfp4", {"weight_scale_2": lambda t: -t}, "one positive number"),
        ("comfy:nvfp4", {"weight_scale_2": lambda t: t.expand(2).contiguous()}, "one positive number"),
        ("comfy:nvfp4", {"weight": lambda t: t[0]}, "not a matrix"),
        ("comfy:nvfp4", {"weight": lambda t: t.view(torch.int8)}, "declared as nvfp4"),
        ("mxfp8", {"weight": lambda t: t.view(torch.float8_e5m2)}, "declared as mxfp8"),
    ],
)  # fmt: skip
def test_what_is_damaged(scheme: str, changes: Any, word: str, tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=word):
        sdquant.verify(write(tmp_path, _format(scheme), _edited(scheme, **changes)))


@pytest.mark.parametrize("scheme", ["comfy:nvfp4", "mxfp8"])
@pytest.mark.parametrize("shape", [(31, 64), (32, 63), (64, 64), (32, 32), (32,), (2, 16, 64)])
def test_a_model_of_another_size(scheme: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = write(tmp_path, _format(scheme), _theirs(scheme, _weight((96, 192)))[0])
    with pytest.raises(BadFileError, match=r"needed|needs"):
        read(path, shape)


@pytest.mark.parametrize("kind", ["comfy nvfp4", "comfy mxfp8"])
def test_a_file_of_comfy_kitchen_draws_what_its_own_weights_draw(
    kind: str, foreign: Callable[[str], Path], flux: Path, tmp_path: Path
) -> None:
    path, values = foreign(kind), {"base": flux, "dtype": "float32", "progress": False}
    pipe = sdquant.load_model(path, **values)
    mine = dict(quantized(pipe.transformer))
    assert pipe.sdquant.plan.warnings == () and len(mine) > 20
    file = load_file(path)
    floats = {key: tensor.float() for key, tensor in file.items() if "weight_scale" not in key}
    for name, found in single_file(path).prequantized.items():
        floats[name] = _dequantized(read_weight(found, None, None, file.__getitem__), file, name)
    save_file(floats, tmp_path / "floats.safetensors")
    theirs = images(sdquant.load_model(tmp_path / "floats.safetensors", **values), 1)
    assert np.abs(images(pipe, 1).astype(int) - theirs).max() <= 1

    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", dtype="float32", progress=False)
    assert {name: packed.spec for name, packed in quantized(again.transformer)} == {n: p.spec for n, p in mine.items()}
    assert np.array_equal(images(again, 1), images(pipe, 1))


def _dequantized(packed: Packed, file: dict[str, Tensor], name: str) -> Tensor:
    """The weight by comfy-kitchen."""
    codes, scale = file[name], file[f"{name}_scale"]
    values: Any = {"orig_dtype": torch.float32, "orig_shape": packed.spec.shape}
    if f"{name}_scale_2" not in file:
        return TensorCoreMXFP8Layout.dequantize(codes, TensorCoreMXFP8Layout.Params(scale=scale, **values))
    params = TensorCoreNVFP4Layout.Params(scale=file[f"{name}_scale_2"], block_scale=scale, **values)
    return TensorCoreNVFP4Layout.dequantize(codes, params)


def test_the_name_of_two_schemes(tmp_path: Path) -> None:
    """GGUF has an NVFP4 of its own: a bare name is that, and `backend:scheme` tells them apart."""
    names = {text: backends.scheme(text).backend for text in ("nvfp4", "gguf:nvfp4", "comfy:nvfp4", "COMFY:NVFP4")}
    assert list(names.values()) == ["gguf", "gguf", "comfy", "comfy"]
    assert str(backends.parse("comfy:nvfp4,embeddings")) == "comfy:nvfp4,embeddings"
    with pytest.raises(UnknownQuantError, match="or 'comfy:nvfp4'"):
        backends.parse("bnb:nvfp4")
    # GGUF's is only for GGUF files: where ComfyUI's may be meant it is refused, and both are named.
    with pytest.raises(IncompatibleError, match="quant='comfy:nvfp4'"):
        sdquant.check("nvfp4", "none", mode="pre")
    with pytest.raises(SettingsError, match=r"a GGUF type.* or use 'comfy:nvfp4'"):
        quantize_file("digits-flux", "nvfp4", tmp_path / "model.safetensors")
    with pytest.raises(ConflictError, match="already quantized to comfy:nvfp4"):
        sdquant.plan(write(tmp_path, {"format": "nvfp4"}, _theirs("comfy:nvfp4", _weight((32, 64)))[0]), "nvfp4")

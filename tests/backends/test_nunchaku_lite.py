"""SVDQuant as diffusers' nunchaku_lite: packed as Nunchaku packs, loaded by diffusers as far as a CPU goes."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.quantizers.quantization_config import NunchakuLiteQuantizationConfig
from safetensors.torch import load_file
from torch import Tensor

import sdquant
from sdquant import backends
from sdquant.cli import main
from sdquant.demo import path
from sdquant.nn import quantized_layer
from sdquant.nn.weights import quantized
from sdquant.saving.library_formats import store_weights
from sdquant.saving.nunchaku_lite import FORMAT

from ..test_load_modes import images
from .test_nunchaku import COMFY, _golden

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("name", ["svdq_int4", "svdq_nvfp4_wcscales"])
def test_packed_as_by_its_own_packer(name: str) -> None:
    """What was unpacked from the tensors of deepcompressor's packer becomes these again, byte by byte."""
    file, found = _golden(name)
    packed = COMFY.read(found, None, file.__getitem__)
    bias = backends.nunchaku_bias([found], ["layer.bias"], [False], file.__getitem__)
    made = backends.nunchaku_lite(packed, "bfloat16", bias)
    names = {"smooth_factor": "smooth", "proj_down": "lora_down", "proj_up": "lora_up"}
    for word, tensor in made.items():
        if word not in ("wtscale", "wcscales"):  # whose product is the same
            theirs = file[f"layer.{names.get(word, word)}"]
            assert theirs.dtype == tensor.dtype and torch.equal(_bytes(theirs), _bytes(tensor)), word
    if "nvfp4" in name:
        rows = made["wcscales"] * made["wtscale"]
        assert torch.equal(rows, file["layer.wcscales"])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.fixture(scope="module", params=["svdq-int4", "svdq-nvfp4"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("lite") / str(request.param)
    words = ["-q", str(request.param), "--components", "transformer", "--portable", "--dtype", "bfloat16"]
    assert main(["quantize", str(path("digits-flux")), str(target), *words]) == 0
    return target


def test_the_same_weights_again(folder: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"dtype": "bfloat16", "progress": False}
    made = sdquant.load_model(path("digits-flux"), folder.name, components=("transformer",), **values)
    again = sdquant.load_model(folder, **values)
    mine, found = dict(quantized(made.transformer)), dict(quantized(again.transformer))
    assert found and found.keys() <= mine.keys()
    assert all(any(size % 128 for size in mine[name].spec.shape) for name in mine.keys() - found.keys())
    for name, packed in found.items():
        assert packed.spec == mine[name].spec and packed.parts.keys() == mine[name].parts.keys(), name
        assert all(torch.equal(_bytes(mine[name].parts[part]), _bytes(tensor)) for part, tensor in packed.parts.items())
    for name, tensor in made.transformer.state_dict().items():
        if name.endswith("bias"):
            assert torch.equal(again.transformer.state_dict()[name], tensor), name
    seen = sdquant.verify(folder).parts["transformer"]
    assert (seen.quant, seen.warnings) == (backends.scheme(folder.name).name, [])
    sdquant.save(again, tmp_path / "again", portable=True)
    one, other = load_file(folder / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert one.keys() == other.keys() and all(torch.equal(_bytes(one[key]), _bytes(other[key])) for key in one)
    drawn = images(again, 1)
    assert np.isfinite(drawn).all()
    offloaded = sdquant.load_model(folder, offload="sequential", **values)
    assert np.array_equal(images(offloaded, 1), drawn)


def test_an_offloaded_model_in_another_dtype(tmp_path: Path) -> None:
    """Whether its factors survive the cast is seen of their values, which are elsewhere between passes."""
    pipe = sdquant.load_model(path("digits-flux"), "svdq-int4", components=("transformer",), progress=False)
    sdquant.save(pipe.transformer, tmp_path / "own")
    for mode in ("none", "sequential"):
        model = sdquant.load_model(tmp_path / "own", dtype="float16", offload=mode, progress=False)
        sdquant.save(model, tmp_path / mode, portable="nunchaku_lite")
    one, other = (load_file(tmp_path / name / Path(WEIGHTS).name) for name in ("none", "sequential"))
    assert one.keys() == other.keys() and all(torch.equal(_bytes(one[key]), _bytes(other[key])) for key in one)


def test_sdquants_own_folder_stays_its_own(tmp_path: Path) -> None:
    pipe = sdquant.load_model(path("digits-flux"), "svdq-int4", components=("transformer",), progress=False)
    sdquant.save(pipe, tmp_path / "own")
    config = json.loads((tmp_path / "own" / "transformer" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "sdquant"


class _Layers(torch.nn.Module):
    """Layers a, b, ... of these schemes."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, **schemes: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, scheme in schemes.items():
            layer = torch.nn.Linear(256, 192 if name == "e" else 256, dtype=dtype)  # e has no whole tiles
            self.add_module(name, _quantized(layer, scheme))


def _quantized(layer: torch.nn.Linear, scheme: str) -> torch.nn.Module:
    packed = COMFY.encode(layer.weight.detach(), backends.parse(scheme))
    return quantized_layer(layer, packed, layer.weight.dtype)


def test_only_one_kind_fits_a_config() -> None:
    specs = {"a": "svdq-int4", "b": "svdq-int4", "c": "svdq-int4,rank=16", "d": "svdq-nvfp4", "e": "svdq-int4"}
    stored = store_weights(FORMAT, _Layers(**specs))
    assert stored.keys() == {"a.weight", "b.weight"}
    assert FORMAT.config(stored, [])["svdq_w4a4"]["targets"] == ["a", "b"]
    assert store_weights(FORMAT, _Layers(e="svdq-int4")) == {}


@pytest.mark.parametrize("scheme", ["svdq-int4", "svdq-nvfp4"])
@pytest.mark.parametrize("made", [torch.bfloat16, torch.float16])
def test_a_cast_model_is_written_in_its_new_dtype(scheme: str, made: torch.dtype) -> None:
    """All floats of a layer, of which the kernels take one kind; a layer whose factors would be lost becomes floats."""
    other = torch.float16 if made == torch.bfloat16 else torch.bfloat16
    model = _Layers(made, a=scheme, b=scheme).to(other)
    smooth: Any = model.get_submodule("b").packed.parts["smooth"]  # type: ignore[operator]
    lost = {torch.float16: 1e5, torch.bfloat16: 1 + 2**-8}[other]  # infinite; between two numbers, yet half a step away
    smooth[0] = lost
    stored = store_weights(FORMAT, model)
    assert stored.keys() == ({"a.weight"} if other == torch.float16 else {"a.weight", "b.weight"})
    assert FORMAT.config(stored, [])["compute_dtype"] == str(other).removeprefix("torch.")
    assert stored["a.weight"].create is not None
    for name, tensor in stored["a.weight"].create().items():
        assert tensor.dtype in (other, torch.int8, torch.float8_e4m3fn), name
        form = stored["a.weight"].tensors[name]
        assert form.is_meta and (form.shape, form.dtype) == (tensor.shape, tensor.dtype)


@pytest.fixture
def their_modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """diffusers' modules of nunchaku_lite, which import their kernels from the hub: for a card, and not here. What
    multiplies with them is not called."""
    kernels = types.ModuleType("kernels")
    kernels.get_kernel = lambda *names, **values: types.SimpleNamespace(ops=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setattr("diffusers.utils.is_kernels_available", lambda: True)
    monkeypatch.setattr("diffusers.utils.is_kernels_version", lambda *words: True)
    monkeypatch.setattr("diffusers.utils.constants.DIFFUSERS_TRUST_REMOTE_KERNELS", True)
    name = "diffusers.quantizers.nunchaku.utils"
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def test_diffusers_own_modules_take_it(folder: Path, their_modules: Any) -> None:
    """Its config, its replacement of layers and its check of keys; shapes and dtypes. It refuses CPUs beyond that."""
    config = json.loads((folder / "transformer" / "config.json").read_text())
    given = config.pop("quantization_config")
    theirs = NunchakuLiteQuantizationConfig.from_dict(given)  # which checks every entry
    assert theirs.svdq_w4a4["targets"] == given["svdq_w4a4"]["targets"] and theirs.compute_dtype == torch.bfloat16
    with torch.device("meta"):
        model = FluxTransformer2DModel.from_config(config).to(torch.bfloat16)
    count = their_modules.replace_with_nunchaku_linear(model, theirs.to_dict(), theirs.compute_dtype)
    state = load_file(folder / WEIGHTS)
    assert count == sum(key.endswith(".qweight") for key in state) > 10
    their_modules.check_strict_state_dict_match(model, state)
    for name, tensor in model.state_dict().items():
        assert state[name].shape == tensor.shape, name
        in_layer = name.rpartition(".")[0] in given["svdq_w4a4"]["targets"]
        assert state[name].dtype == tensor.dtype or not in_layer, name


def test_diffusers_says_what_it_needs(folder: Path) -> None:
    with pytest.raises((ImportError, ValueError), match="Nunchaku checkpoints requires"):
        FluxTransformer2DModel.from_pretrained(folder / "transformer")

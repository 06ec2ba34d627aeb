"""Models whose GGUF weights are kept with their fields apart, as they are for cards, here on the CPU: the same pictures
and the same files as from blocks."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from transformers import CLIPTextModel

import sdquant
from sdquant.backends import _gguf_blocks
from sdquant.backends.gguf import BACKEND
from sdquant.core.gguf_fields import FIELDS
from sdquant.kernels import dispatch, int8_linear, int_matmul, prepack
from sdquant.models.pipelines import weight_bytes, weight_parts
from sdquant.nn import QuantizedLayer
from sdquant.nn.quantized_layers import QuantizedEmbedding
from sdquant.nn.weights import quantized
from sdquant.saving import model_files

KIND = "q6_k"  # the types of its mix: q6_k, and q8_0 where rows are no whole blocks of 256


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers whatever the order: no kernels for CPUs, which add up in an order of their own."""
    monkeypatch.setattr(dispatch, "readers", lambda kind: ())
    monkeypatch.setattr(dispatch, "_ways", {})


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepack, "wanted", lambda form, device: form.packing in FIELDS)


@pytest.fixture(scope="module")
def folder(saved: Any) -> Path:
    path: Path = saved(KIND)
    return path


def images(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return pipe("a handwritten seven", num_inference_steps=2, output_type="np", generator=generator).images


def layers(model: Any) -> Iterator[QuantizedLayer]:
    for part in (weight_parts(model) if hasattr(model, "components") else {"model": model}).values():
        yield from (module for module in part.modules() if isinstance(module, QuantizedLayer))


def all_apart(model: Any) -> bool:
    orders = {(isinstance(layer, QuantizedEmbedding), layer.part_names) for layer in layers(model)}
    return (False, ("fields",)) in orders and orders <= {(False, ("fields",)), (True, ("blocks",))}


def files(folder: Path) -> dict[str, str]:
    """What models are in, without tokenizers, which tokenizers writes in an order of its own."""
    paths = [*folder.rglob("*.safetensors"), *folder.rglob("config.json")]
    assert paths
    return {str(path.relative_to(folder)): hashlib.sha256(content(path)).hexdigest() for path in paths}


def content(path: Path) -> bytes:
    """The file; the metadata of a safetensors file, which safetensors writes in any order, sorted."""
    whole = path.read_bytes()
    if path.suffix != ".safetensors":
        return whole
    end = 8 + int.from_bytes(whole[:8], "little")
    return json.dumps(json.loads(whole[8:end]), sort_keys=True).encode() + whole[end:]


@pytest.fixture(scope="module")
def drawn(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "readers", lambda kind: ())
        patch.setattr(dispatch, "_ways", {})
        return images(sdquant.load_model(folder, progress=False))


@pytest.mark.parametrize("offload", ["none", "model", "balanced", "sequential", "group"])
def test_pictures_are_those_of_blocks(offload: str, folder: Path, drawn: Any, apart: None) -> None:
    budget = "2MB" if offload == "balanced" else None
    pipe = sdquant.load_model(folder, offload=offload, budget=budget, runtime="plain", progress=False)
    assert all_apart(pipe)
    assert np.array_equal(images(pipe), drawn)
    assert all_apart(pipe)
    assert weight_bytes(pipe) == pipe.sdquant.plan.bytes


def test_pictures_in_integers_are_those_of_blocks(folder: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From few rows on, which alone this small model has; by torch in both, whose runs of a row C would know."""
    monkeypatch.setattr(int8_linear.native, "reads", lambda form, parts: False)
    monkeypatch.setattr(int_matmul, "fast", lambda device: True)  # which torch's own product is with VNNI alone
    monkeypatch.setattr(int8_linear, "BY_TORCH", int8_linear.Least(rows=1, again=1, channels=1, columns=1))
    blocks = images(sdquant.load_model(folder, compute="int8", progress=False))
    monkeypatch.setattr(prepack, "wanted", lambda form, device: True)
    pipe = sdquant.load_model(folder, compute="int8", progress=False)
    assert all_apart(pipe) and np.array_equal(images(pipe), blocks)
    assert not np.array_equal(blocks, drawn)


@pytest.mark.parametrize("offload", ["none", "balanced"])
def test_what_is_saved_is_what_blocks_are_saved_as(
    offload: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdquant.save(sdquant.load_model(folder, progress=False), tmp_path / "blocks")
    monkeypatch.setattr(prepack, "wanted", lambda form, device: True)
    pipe = sdquant.load_model(folder, offload=offload, progress=False)
    assert all_apart(pipe)
    sdquant.save(pipe, tmp_path / "fields")
    assert files(tmp_path / "fields") == files(tmp_path / "blocks")
    sdquant.save(pipe.unet, tmp_path / "unet.safetensors")
    whole = (tmp_path / "unet.safetensors").read_bytes()
    assert whole == (tmp_path / "blocks" / "unet" / "diffusion_pytorch_model.safetensors").read_bytes()
    tensors, metadata = model_files.contents(pipe.unet)
    monkeypatch.undo()
    wanted, said = model_files.contents(sdquant.load_model(folder / "unet", progress=False))
    assert metadata == said and tensors.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in tensors.items())


def test_saving_puts_one_weight_at_a_time_together(
    folder: Path, tmp_path: Path, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = sdquant.load_model(folder / "unet", progress=False)
    made: list[weakref.ref[torch.Tensor]] = []
    together = _gguf_blocks.together

    def noted(kind: str, fields: torch.Tensor) -> torch.Tensor:
        assert sum(one() is not None for one in made) <= 1  # the one that was written last
        blocks = together(kind, fields)
        if blocks.device.type != "meta":
            made.append(weakref.ref(blocks))
        return blocks

    monkeypatch.setattr(_gguf_blocks, "together", noted)
    sdquant.save(unet, tmp_path / "unet.safetensors")
    assert len(made) == sum(True for _ in quantized(unet))


def test_a_device_that_wants_blocks_gets_them(folder: Path) -> None:
    unet = sdquant.load_model(folder / "unet", device="cpu", progress=False)
    assert {layer.part_names for layer in layers(unet)} == {("blocks",)}


def test_the_device_is_the_one_that_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    def wanted(form: object, device: str) -> bool:
        asked.add(device)
        return False

    monkeypatch.setattr(prepack, "wanted", wanted)
    sdquant.load_model(folder / "unet", offload="model", device="cpu", runtime="plain", progress=False)
    assert asked == {"cpu"}


@pytest.mark.parametrize("component", [("unet", UNet2DConditionModel), ("text_encoder", CLIPTextModel)])
def test_the_libraries_load_and_save_it(
    component: tuple[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, kind = component
    sdquant.save(sdquant.load_model(folder, progress=False), tmp_path / "whole")
    plain = kind.from_pretrained(tmp_path / "whole" / name)
    plain.save_pretrained(tmp_path / "blocks")
    monkeypatch.setattr(prepack, "wanted", lambda form, device: True)
    model = kind.from_pretrained(tmp_path / "whole" / name)
    assert all_apart(model)
    for path, packed in quantized(model):
        wanted = plain.get_submodule(path.removesuffix(".weight")).dequantize(torch.float32)
        assert torch.equal(BACKEND.decode(packed, torch.float32), wanted)
    model.save_pretrained(tmp_path / "fields")
    assert files(tmp_path / "fields") == files(tmp_path / "blocks")


def test_a_lora_goes_on_and_off(folder: Path, apart: None) -> None:
    from sdquant import lora

    pipe = sdquant.load_model(folder, progress=False)
    before = images(pipe)
    parameters = lora.add_lora(pipe.unet, rank=2)
    assert np.array_equal(images(pipe), before)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.05)
    assert not np.array_equal(images(pipe), before)
    pipe.unet.delete_adapters("default")
    assert all_apart(pipe) and np.array_equal(images(pipe), before)

"""Files that `sdquant quantize` writes of video models: their authors' names, for ComfyUI's readers and for our own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

import sdquant
from sdquant import backends
from sdquant.formats.gguf.file import read_header
from sdquant.nn.weights import plain, quantized
from sdquant.saving import export_gguf, export_single_file

from . import comfy_gguf, video_models
from .video_models import MODELS

if TYPE_CHECKING:
    from pathlib import Path

MAIN = [name for name, row in MODELS.items() if row.architecture]


@pytest.mark.parametrize("name", MAIN)
def test_gguf_has_the_authors_names(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = video_models.made(name, tmp_path)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "sdquant"):
        file = export_gguf.quantize_file(made.folder, "q8_0", tmp_path / "model.gguf", progress=False)
        loaded = sdquant.load_model(file, progress=False)
    assert not caplog.records
    header = read_header(file)
    assert header.metadata["general.architecture"] == made.row.architecture
    wanted = {key: tuple(tensor.shape) for key, tensor in made.authors.items() if not key.endswith(".kernel")}
    assert {key: tuple(info.shape) for key, info in header.tensors.items()} == wanted
    packed, floats = dict(quantized(loaded)), plain(loaded)
    assert packed
    backend = backends.get("gguf")
    for key, tensor in made.state.items():
        if key in packed:
            blocks = backend.encode(tensor, backends.parse("q8_0")).parts["blocks"]
            assert torch.equal(packed[key].parts["blocks"].flatten(), blocks.flatten()), key
        else:
            assert torch.equal(floats[key], tensor), key
    if made.row.architecture not in comfy_gguf.IMAGE_MODELS:
        with pytest.raises(comfy_gguf.Refused, match=str(made.row.architecture)):
            comfy_gguf.read(file)
        return
    tag, tensors, types = comfy_gguf.read(file)
    assert tag == made.row.architecture
    for key, tensor in tensors.items():
        if types[key] != "Q8_0":
            assert torch.equal(tensor, made.authors[key].float()), key
    patches = [key for key, tensor in tensors.items() if tensor.ndim == 5]
    assert {types[key] for key in patches} <= {"F32"}
    assert patches or not any(tensor.ndim == 5 for tensor in made.state.values())


@pytest.mark.parametrize("quant", ["nf4", "fp8", "qint8"])
@pytest.mark.parametrize("name", ["wan of images", "hunyuan", "ltx 2", "cosmos 1", "minimax"])
def test_a_single_file_that_is_quantized(name: str, quant: str, tmp_path: Path) -> None:
    """Read back, each weight is what the codec makes of the whole that was written; fused ones are cut by rows."""
    made = video_models.made(name, tmp_path)
    file = export_single_file.quantize_file(made.folder, quant, tmp_path / "model.safetensors", progress=False)
    seen = sdquant.detect(file)
    read_as = {"qint8": "int8_row"}.get(quant, quant)  # the same format, whose files do not say which wrote them
    assert (seen.family, seen.component, seen.quant) == (made.row.family, made.row.component, read_as)
    loaded = sdquant.load_model(file, progress=False)
    packed, floats = dict(quantized(loaded)), plain(loaded)
    assert packed
    for key, tensor in made.state.items():
        if key not in packed:
            assert torch.equal(floats[key], tensor), key
            continue
        weight = packed[key]
        got = weight.spec.scheme.codec.decode(weight, torch.float32)
        assert got.shape == tensor.shape
        error = (got - tensor.float()).norm() / tensor.float().norm()
        assert error < {"nf4": 0.15, "fp8": 0.05, "qint8": 0.02}[quant], key

"""What a folder takes beside its weights: no less than is written, and nothing of what is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import sdquant
from sdquant.backends import encode
from sdquant.cli import main
from sdquant.core import TensorInfo, registry
from sdquant.demo import path
from sdquant.formats import Checkpoint, safetensors_writer
from sdquant.models import detect
from sdquant.planning import mix, mix_pool
from sdquant.saving import folder_size, model_files

SD = path("digits-sd")
EVERY = ("unet", "text_encoder", "vae")


def test_what_is_not_written_is_not_counted(tmp_path: Path) -> None:
    """Schemes of components that stay floats, weights of other libraries, pictures, and what a file replaces."""
    sources = detect(SD).sources
    some, all_of = (folder_size.most_beside(sources, names, SD) for names in (("unet", "text_encoder"), EVERY))
    assert some < all_of - 38 * 420
    copy = Path(shutil.copytree(SD, tmp_path / "copy"))
    (copy / "unet" / "flax_model.msgpack").write_bytes(bytes(100_000))
    (copy / "picture.png").write_bytes(bytes(100_000))
    assert folder_size.most_beside(detect(copy).sources, EVERY, copy) == all_of
    alone = folder_size.most_beside({"": sources["unet"]}, [""], SD / "unet")
    parts = [folder_size.most_beside({name: sources[name]}, EVERY, "") for name in EVERY]
    assert alone == parts[0] and sum(parts) < all_of < sum(parts) + 25_000  # with the tokenizer and the scheduler


@pytest.mark.parametrize("word", [*mix.FAMILIES[mix.OWN], "q4_k,gptq", "sdnq-uint4,gptq,hadamard"])
def test_header_by_scheme(word: str) -> None:
    """No shorter than what is written, and hardly longer: what is reserved for nothing is missing in codes."""
    names = [f"blocks.{number}.attn.to_q.weight" for number in range(20)]
    packed = encode(torch.randn(256, 256).bfloat16(), registry.parse(word.replace("gptq,", "").replace(",gptq", "")))
    norms = {f"blocks.{number}.norm.weight": torch.ones(4) for number in range(20)}
    tensors, metadata = model_files.written([(name, packed) for name in names], norms, {})
    parts = {key: safetensors_writer.part_of(tensor) for key, tensor in tensors.items()}
    header = safetensors_writer._header(parts, metadata)[0]
    infos = {name: TensorInfo(dtype="bfloat16", shape=(256, 256), nbytes=131_072) for name in names}
    infos |= {name: TensorInfo(dtype="float32", shape=(4,), nbytes=16) for name in norms}
    src = Checkpoint(path=Path("x"), files=(), tensors=infos, home={}, prequantized={})
    beside = folder_size.bytes_beside({"": src}, {"": dict.fromkeys(names, (word, mix_pool.FLOAT))}, "")
    more = sum(part.nbytes for part in parts.values()) - 20 * packed.nbytes - 20 * 16
    whole = beside.fixed + sum(beside.of("", name, word) for name in names)
    room = 1500 + 60 * len(names) * word.startswith("sdnq")  # for a config that names all weights
    room += 200 * len(names) * (word == "int8_row")  # for what keeps ComfyUI away from mixes with other schemes
    assert len(header) + more <= whole < 1.05 * (len(header) + more) + room
    assert all(beside.of("", name, mix_pool.FLOAT) < beside.of("", name, word) for name in names)


def test_tokenizers_that_are_written_again(tmp_path: Path) -> None:
    """A tokenizer.json of before, with merges as texts and all on one line, is larger then."""
    from transformers import CLIPTokenizer

    home = Path(shutil.copytree(SD / "tokenizer", tmp_path / "tokenizer"))
    file = home / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["merges"] = [" ".join(pair) for pair in values["model"]["merges"]]
    for indent in (2, None):
        file.write_text(json.dumps(values, indent=indent))
        CLIPTokenizer.from_pretrained(home).save_pretrained(tmp_path / "again")
        written = sum(one.stat().st_size for one in (tmp_path / "again").iterdir())
        assert written <= folder_size._of_part(home) <= 4 * written


@pytest.mark.slow
def test_a_file_in_a_pipeline(tmp_path: Path) -> None:
    """The weights that it replaces there are no part of what is written."""
    file, out, size = tmp_path / "unet.safetensors", tmp_path / "out", 2_400_000
    shutil.copy(SD / "unet" / "diffusion_pytorch_model.safetensors", file)
    words = ["-q", f"auto,size={size}", "--base", str(SD), "--no-progress"]
    assert main(["quantize", str(file), str(out), *words]) == 0
    written = sum(one.stat().st_size for one in out.rglob("*") if one.is_file())
    assert 0.99 * size < written <= size
    assert sdquant.load_model(out, progress=False).sdquant.plan.bytes < size

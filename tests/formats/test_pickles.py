"""torch's own checkpoints: refused unless allowed, then opened with weights_only, and nothing in them is run."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sdquant
from sdquant.cli import main
from sdquant.errors import BadFileError, MissingComponentError, UnsupportedFileError
from sdquant.formats.pickle import PickleFile
from sdquant.models.pipelines import weight_parts
from sdquant.nn.weights import plain

from .. import layouts
from ..foreign import WEIGHTS
from ..test_load_modes import same_bits


@pytest.fixture
def checkpoint(sd: Path, tmp_path: Path) -> Path:
    """digits-sd as people had it before safetensors: one .ckpt, with what training left in it."""
    tensors = load_file(layouts.checkpoint(sd, tmp_path / "digits-v1.safetensors"))
    torch.save({"state_dict": tensors, "global_step": 840000, "epoch": 3}, tmp_path / "digits-v1.ckpt")
    return tmp_path / "digits-v1.ckpt"


@pytest.fixture
def pipeline(sd: Path, tmp_path: Path) -> Path:
    """digits-sd as a folder of .bin files."""
    folder = Path(shutil.copytree(sd, tmp_path / "pipe"))
    for path in folder.rglob("*.safetensors"):
        name = "pytorch_model.bin" if "text" in path.parent.name else path.with_suffix(".bin").name
        torch.save(load_file(path), path.with_name(name))
        path.unlink()
    torch.save({"lr": torch.ones(1)}, folder / "unet" / "optimizer.bin")
    return folder


def _same(one: Any, other: Any) -> None:
    for name, part in weight_parts(one).items():
        theirs = plain(weight_parts(other)[name])
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in plain(part).items()), name


def test_not_unless_it_is_allowed(checkpoint: Path, pipeline: Path, sd: Path, capsys: Any) -> None:
    for path in (checkpoint, pipeline, pipeline / "unet"):
        for call in (sdquant.detect, sdquant.verify, sdquant.load_model, lambda path: sdquant.plan(path, "int8")):
            with pytest.raises(UnsupportedFileError, match="pickle") as caught:
                call(path)
            assert "allow_pickle" in caught.value.fix and "--allow-pickle" in caught.value.fix
    assert main(["inspect", str(checkpoint)]) == 2
    assert "--allow-pickle" in capsys.readouterr().err
    assert main(["inspect", "--allow-pickle", "--verify", str(checkpoint)]) == 0
    shown = capsys.readouterr().out
    assert "pickle" in shown and "verified" in shown and "ldm layout" in shown


@pytest.mark.parametrize("mode", ["pre", "post"])
def test_a_checkpoint(mode: str, checkpoint: Path, sd: Path) -> None:
    pipe = sdquant.load_model(checkpoint, "int8", base=sd, mode=mode, allow_pickle=True, progress=False)
    whole = sdquant.load_model(checkpoint.with_suffix(".safetensors"), "int8", base=sd, progress=False)
    same_bits(pipe, whole)
    assert pipe.sdquant.plan.to_dict()["bytes"] == whole.sdquant.plan.to_dict()["bytes"]


def test_a_folder(pipeline: Path, sd: Path, tmp_path: Path, capsys: Any) -> None:
    _same(sdquant.load_model(pipeline, allow_pickle=True, progress=False), sdquant.load_model(sd, progress=False))
    assert sdquant.detect(pipeline, allow_pickle=True).sources["unet"].container == "pickle"
    assert main(["quantize", str(pipeline), str(tmp_path / "out"), "-q", "int8", "--allow-pickle"]) == 0
    assert main(["quantize", str(pipeline), str(tmp_path / "out.gguf"), "-q", "q8_0", "--allow-pickle"]) == 0
    capsys.readouterr()
    assert {sdquant.detect(tmp_path / name).quant for name in ("out", "out.gguf")} == {"int8", "q8_0"}
    same_bits(sdquant.load_model(tmp_path / "out", progress=False), sdquant.load_model(sd, "int8", progress=False))


def test_shards(sd: Path, tmp_path: Path) -> None:
    folder, tensors = tmp_path / "unet", load_file(sd / "unet" / WEIGHTS)
    folder.mkdir()
    shutil.copy(sd / "unet" / "config.json", folder)
    names = {key: f"diffusion_pytorch_model-0000{1 + at % 2}-of-00002.bin" for at, key in enumerate(tensors)}
    for file in set(names.values()):
        torch.save({key: tensor for key, tensor in tensors.items() if names[key] == file}, folder / file)
    index = folder / "diffusion_pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    model = sdquant.load_model(folder, allow_pickle=True, progress=False)
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in plain(model).items())
    index.write_text(json.dumps({"weight_map": names | {"ghost.weight": next(iter(names.values()))}}))
    with pytest.raises(BadFileError, match=r"ghost\.weight"):
        sdquant.detect(folder, allow_pickle=True)
    index.unlink()
    with pytest.raises(UnsupportedFileError, match="several files"):
        sdquant.detect(folder, allow_pickle=True)


def test_safetensors_are_taken_where_there_are_both(pipeline: Path, sd: Path) -> None:
    unet = pipeline / "unet"
    (unet / "diffusion_pytorch_model.bin").write_bytes(b"this is not opened")
    shutil.copy(sd / "unet" / WEIGHTS, unet)
    assert sdquant.detect(unet).container == sdquant.detect(unet, allow_pickle=True).container == "component"
    assert sdquant.detect(unet, allow_pickle=True).sources["model"].container == "safetensors"
    with (unet / WEIGHTS).open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(BadFileError):  # and never the pickle instead
        sdquant.detect(unet, allow_pickle=True)


class _Program:
    """Something that runs when it is unpickled the usual way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["beside", "inside", "alone"])
def test_programs_are_not_run(where: str, tmp_path: Path) -> None:
    program = _Program(tmp_path / "it-ran")
    weights: dict[str, Any] = {"a.weight": torch.ones(2, 2)}
    held = {"beside": {"state_dict": weights, "callbacks": program}, "inside": weights | {"b": program}}
    torch.save(held.get(where, program), tmp_path / "model.ckpt")
    for call in (sdquant.detect, sdquant.verify):
        with pytest.raises(UnsupportedFileError, match="more than weights") as caught:
            call(tmp_path / "model.ckpt", allow_pickle=True)
        assert str(tmp_path / "model.ckpt") in caught.value.what and "safetensors" in caught.value.fix
    assert not (tmp_path / "it-ran").exists()
    torch.load(tmp_path / "model.ckpt", weights_only=False)
    assert (tmp_path / "it-ran").exists()  # as it would have


def _rewritten(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {row.filename: archive.read(row) for row in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, change(name, data))


def _damaged(kind: str, path: Path) -> None:
    tensors: dict[str, Any] = {"a.weight": torch.arange(64.0).view(8, 8), "b.bias": torch.ones(8)}
    if kind == "old":
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
        return
    tensors |= {
        "expanded": {"c": torch.ones(1).expand(1 << 20)}, "sparse": {"c": torch.eye(3).to_sparse()},
        "complex": {"c": torch.ones(2, dtype=torch.complex64)},
    }.get(kind, {})  # fmt: skip
    torch.save([1, 2] if kind == "list" else {"epoch": 3} if kind == "no tensors" else tensors, path)
    raw = path.read_bytes()
    if kind in ("short", "empty", "text"):
        path.write_bytes({"short": raw[: len(raw) // 2], "empty": b"", "text": b"<html>"}[kind])
    elif kind == "compressed":
        _rewritten(path, lambda name, data: data, zipfile.ZIP_DEFLATED)
    elif kind == "no pickle":
        _rewritten(path, lambda name, data: b"" if name.endswith("data.pkl") else data)
    elif kind == "huge pickle":
        _rewritten(path, lambda name, data: data + bytes(65 << 20) if name.endswith("data.pkl") else data)
    elif kind == "missing numbers":
        _rewritten(path, lambda name, data: data[:8] if name.endswith("data/0") else data)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")  # of torch 2.15
@pytest.mark.parametrize(
    "kind",
    [
        "old", "expanded", "sparse", "complex", "list", "no tensors", "short", "empty", "text", "compressed",
        "no pickle", "huge pickle", "missing numbers",
    ],
)  # fmt: skip
def test_what_is_no_checkpoint(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    _damaged("", path)
    with PickleFile(path) as sound:
        assert set(sound.tensors) == {"a.weight", "b.bias"} and torch.equal(sound.get("b.bias"), torch.ones(8))
    _damaged(kind, path)
    with pytest.raises((BadFileError, UnsupportedFileError)) as caught:
        sdquant.verify(path, allow_pickle=True)
    assert str(path) in caught.value.what


def test_a_table_that_holds_itself(tmp_path: Path) -> None:
    held: dict[str, Any] = {"a.weight": torch.ones(2, 2)}
    held["again"] = held
    torch.save(held, tmp_path / "model.ckpt")
    with PickleFile(tmp_path / "model.ckpt") as file:
        assert set(file.tensors) == {"a.weight"}


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").mkdir()
    with pytest.raises(MissingComponentError):
        sdquant.detect(tmp_path / "model.ckpt", allow_pickle=True)
    os.mkfifo(tmp_path / "pipe.ckpt")
    with pytest.raises(BadFileError, match="regular"):
        sdquant.detect(tmp_path / "pipe.ckpt", allow_pickle=True)

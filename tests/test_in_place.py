"""Writing where the model came from: refused unless asked for; then the old stays until the new one is whole."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sdquant
from sdquant import backends
from sdquant.cli import main
from sdquant.errors import BadFileError, SettingsError
from sdquant.saving import model_files
from sdquant.saving.export_gguf import quantize_file

from .foreign import WEIGHTS


def _digest(folder: Path) -> dict[str, str]:
    """Of every file in a folder, by its path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def pipe(sd: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sd, tmp_path / "models" / "pipe"))


# By name: the scheme, and the place in the pipeline that is read and written.
PLACES = {
    "a pipeline": ("int8", "."), "a component": ("int8", "unet"), "a pipeline as GGUF": ("q8_0", "."),
    "a component as GGUF": ("q8_0", "unet"),
}  # fmt: skip


@pytest.mark.parametrize(("quant", "part"), PLACES.values(), ids=PLACES)
class TestFolder:
    def test_refused(self, quant: str, part: str, pipe: Path, capsys: Any) -> None:
        before = _digest(pipe.parent)
        link = pipe.parent / "link"
        link.symlink_to(pipe / part)
        for out in (pipe / part, link):
            assert main(["quantize", str(pipe / part), str(out), "--quant", quant, "--no-progress"]) == 2
            assert "it already exists" in capsys.readouterr().err
        link.unlink()
        assert _digest(pipe.parent) == before

    def test_asked_for(self, quant: str, part: str, pipe: Path, capsys: Any) -> None:
        words = ["quantize", str(pipe / part), str(pipe / part), "--quant", quant, "--overwrite", "--no-progress"]
        assert main(words) == 0, capsys.readouterr().err
        assert sdquant.verify(pipe / part).quant == quant
        assert [path.name for path in pipe.parent.iterdir()] == ["pipe"]
        assert sdquant.load_model(pipe, progress=False).sdquant.plan.components

    def test_a_failure_in_the_middle(
        self, quant: str, part: str, pipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        before = _digest(pipe.parent)
        backend = backends.get(backends.parse(quant).scheme.backend)
        real, calls = type(backend).encode, []

        def fails(self: Any, *args: Any) -> Any:
            calls.append(1)
            if len(calls) > 5:
                raise BadFileError("A weight was to be quantized", "this is a test", "Go on")
            return real(self, *args)

        monkeypatch.setattr(type(backend), "encode", fails)
        assert main(["quantize", str(pipe / part), str(pipe / part), "-q", quant, "--overwrite", "--no-progress"]) == 2
        assert "this is a test" in capsys.readouterr().err
        assert len(calls) == 6 and _digest(pipe.parent) == before


class TestSave:
    def test_refused(self, pipe: Path) -> None:
        before = _digest(pipe.parent)
        model = sdquant.load_model(pipe / "unet", "int8", progress=False)
        for target in (pipe / "unet", pipe / "unet" / WEIGHTS):
            with pytest.raises(SettingsError, match="it already exists"):
                sdquant.save(model, target)
        assert _digest(pipe.parent) == before

    @pytest.mark.parametrize("target", [".", WEIGHTS])
    def test_a_failure_in_the_middle(self, target: str, pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The loaded model has tensors mapped from the file that it is about to replace."""
        from sdquant.utils import buffers

        before = _digest(pipe.parent)
        model = sdquant.load_model(pipe / "unet", "int8", progress=False)
        real, calls = buffers.raw_bytes, []

        def fails(tensor: Any) -> Any:
            calls.append(1)
            if len(calls) > 20:
                raise KeyboardInterrupt
            return real(tensor)

        monkeypatch.setattr(buffers, "raw_bytes", fails)
        with pytest.raises(KeyboardInterrupt):
            sdquant.save(model, pipe / "unet" / target, overwrite=True)
        assert len(calls) == 21 and _digest(pipe.parent) == before

    @pytest.mark.parametrize("target", [".", WEIGHTS])
    def test_asked_for(self, target: str, pipe: Path) -> None:
        model = sdquant.load_model(pipe / "unet", "int8", progress=False)
        wanted = {
            name: hashlib.sha256(_raw(tensor)).hexdigest() for name, tensor in model_files.contents(model)[0].items()
        }
        for _ in range(2):  # the second from what the first wrote
            sdquant.save(model, pipe / "unet" / target, overwrite=True)
            assert sdquant.verify(pipe / "unet").quant == "int8"
            model = sdquant.load_model(pipe / "unet", progress=False)
            made = model_files.contents(model)[0]
            assert {name: hashlib.sha256(_raw(tensor)).hexdigest() for name, tensor in made.items()} == wanted


def _raw(tensor: Any) -> bytes:
    from sdquant.utils.buffers import raw_bytes

    return bytes(raw_bytes(tensor))


class TestNested:
    @pytest.mark.parametrize("quant", ["int8", "q8_0"])
    def test_one_in_the_other(self, quant: str, pipe: Path, capsys: Any) -> None:
        before = _digest(pipe.parent)
        for source, out, why in (
            (pipe, pipe / "quantized", "inside the model's own folder"),
            (pipe, pipe / "unet" / "quantized", "inside the model's own folder"),
            (pipe / "unet", pipe, "would be deleted"),
            (pipe / "unet" / WEIGHTS, pipe, "would be deleted"),
        ):
            words = ["quantize", str(source), str(out), "--quant", quant, "--overwrite", "--no-progress"]
            assert main(words) == 2
            assert why in capsys.readouterr().err
        assert _digest(pipe.parent) == before

    def test_a_file_beside_the_models_own(self, pipe: Path) -> None:
        """That is where people keep their GGUF files."""
        quantize_file(pipe / "unet", "q8_0", pipe / "unet-q8_0.gguf", progress=False)
        assert sdquant.detect(pipe / "unet-q8_0.gguf").quant == "q8_0"


class TestCopies:
    """What is not quantized is copied into a GGUF folder; nothing from outside is."""

    def test_a_link_that_leads_out(self, pipe: Path, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        (pipe / "README.md").symlink_to(tmp_path / "secret")
        with pytest.raises(BadFileError, match="outside its folder"):
            quantize_file(pipe, "q8_0", tmp_path / "out", progress=False)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo])
    def test_what_is_no_file(self, make: Callable[[Path], None], pipe: Path, tmp_path: Path) -> None:
        make(pipe / "notes.txt")
        with pytest.raises(BadFileError, match=r"notes\.txt"):
            quantize_file(pipe, "q8_0", tmp_path / "out", progress=False)

    def test_the_hub_cache(self, sd: Path, tmp_path: Path) -> None:
        """Its files are links to blobs, and become files."""
        snapshot = tmp_path / "models--who--digits" / "snapshots" / "0123"
        blobs = snapshot.parent.parent / "blobs"
        blobs.mkdir(parents=True)
        for number, path in enumerate(path for path in sorted(sd.rglob("*")) if path.is_file()):
            place = snapshot / path.relative_to(sd)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, blobs / str(number))
            place.symlink_to(blobs / str(number))
        quantize_file(snapshot, "q8_0", tmp_path / "out", progress=False)
        assert sdquant.verify(tmp_path / "out").quant == "q8_0"
        assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))

"""From one quantized format to another: as if the first had been dequantized to a file and that been quantized, with a
warning of what the second rounding costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sdquant
from sdquant import backends, cli
from sdquant.errors import ConflictError
from sdquant.formats import closing_files
from sdquant.models import RoundingLoss, with_float_weights
from sdquant.saving import dequantize_to, export_gguf, export_single_file

from .foreign import WEIGHTS

Capture = pytest.CaptureFixture[str]


def _cli(*words: str | Path) -> None:
    assert cli.main([*map(str, words), "--no-progress"]) == 0


def _same(one: Path, other: Path) -> bool:
    """Whether two files, or the components of two folders, have the same tensors."""
    pairs = [(one, other)] if one.is_file() else [(path, other / path.relative_to(one)) for path in _weights(one)]
    assert pairs
    return all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
        for mine, theirs in ((_tensors(path), _tensors(there)) for path, there in pairs)
    )


def _weights(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".gguf"))


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path) if path.suffix == ".safetensors" else dict(sdquant.dequantize(path))


class TestFiles:
    @pytest.mark.parametrize(
        ("first", "second"), [("fp8", "int8_convrot"), ("int8_convrot", "fp8"), ("nf4", "q4_k"), ("q4_k", "qint8")]
    )
    def test_it_is_that_of_the_dequantized_file(
        self, first: str, second: str, flux: Path, tmp_path: Path, capsys: Capture
    ) -> None:
        def path(name: str, scheme: str) -> Path:
            return tmp_path / f"{name}.{'gguf' if scheme.startswith('q4') else 'safetensors'}"

        _cli("quantize", flux, path("first", first), "-q", first)
        capsys.readouterr()
        _cli("quantize", path("first", first), path("second", second), "-q", second)
        said = capsys.readouterr().err
        assert f"already ({first})" in said and "rounded a second time" in said
        assert "SNR of" in said and "of 13 weights" in said
        if first != "q4_k":  # whose small tensors are float32, and become the dtype of the rest
            dequantize_to(path("first", first), path("floats", "none"), dtype=None, progress=False)
        else:
            dequantize_to(path("first", first), path("floats", "none"), dtype="bfloat16", progress=False)
        write = export_gguf.quantize_file if second.startswith("q4") else export_single_file.quantize_file
        write(path("floats", "none"), second, path("again", second), progress=False)
        assert _same(path("second", second), path("again", second))
        assert sdquant.verify(path("second", second)).quant == second.replace("qint8", "int8_row")


class TestFolders:
    def test_a_pipeline(self, saved: Callable[..., Path], tmp_path: Path, capsys: Capture) -> None:
        first = saved("nf4")
        _cli("quantize", first, tmp_path / "second", "-q", "int8")
        said = capsys.readouterr().err
        assert said.count("rounded a second time") == 2 and "SNR of" in said and "of 131 weights" in said
        dequantize_to(first, tmp_path / "floats", dtype=None, progress=False)
        _cli("quantize", tmp_path / "floats", tmp_path / "again", "-q", "int8")
        assert "second" not in capsys.readouterr().err
        assert _same(tmp_path / "second", tmp_path / "again")
        config = json.loads((tmp_path / "second" / "unet" / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "sdquant"

    def test_one_component_stays(self, saved: Callable[..., Path], tmp_path: Path, capsys: Capture) -> None:
        _cli("quantize", saved("q8_0"), tmp_path / "second", "-q", "unet=qint8")
        assert capsys.readouterr().err.count("rounded a second time") == 1
        parts = sdquant.detect(tmp_path / "second").parts
        assert (parts["unet"].quant, parts["text_encoder"].quant) == ("qint8", "q8_0")

    def test_a_folder_of_gguf_files(self, saved: Callable[..., Path], tmp_path: Path) -> None:
        """The configs say nothing of the first format."""
        _cli("quantize", saved("sdnq-uint4"), tmp_path / "second", "-q", "q8_0")
        for name in ("unet", "text_encoder"):
            assert "quantization_config" not in json.loads((tmp_path / "second" / name / "config.json").read_text())
        assert sdquant.verify(tmp_path / "second").parts["unet"].quant == "q8_0"

    def test_a_file_of_the_authors_layout_with_its_base(self, flux: Path, tmp_path: Path, capsys: Capture) -> None:
        """Its fused weights are taken apart; they were not quantized with the rest as such."""
        _cli("quantize", flux, tmp_path / "fp8.safetensors", "-q", "fp8")
        out = tmp_path / "pipe"
        _cli("quantize", tmp_path / "fp8.safetensors", out, "--base", flux, "-q", "transformer=int8_row")
        assert "SNR of" in capsys.readouterr().err
        mine, floats = dict(sdquant.dequantize(out / "transformer")), load_file(flux / "transformer" / WEIGHTS)
        assert {key: t.shape for key, t in mine.items()} == {key: t.shape for key, t in floats.items()}
        assert all((mine[key] - floats[key]).norm() < 0.05 * floats[key].float().norm() for key in mine)


def test_loading_converts_nothing(saved: Callable[..., Path]) -> None:
    with pytest.raises(ConflictError) as error:
        sdquant.load_model(saved("nf4"), "int8", progress=False)
    assert "sdquant quantize" in error.value.fix
    with pytest.raises(ConflictError, match="sdquant dequantize"):
        sdquant.load_model(saved("nf4"), "none", progress=False)
    for scheme in ("awq_w4a16", "sdnq-other"):  # which are in files only: no advice that leads to a refusal
        with pytest.raises(ConflictError) as error:
            sdquant.plan(saved("nf4"), scheme)
        assert "sdquant quantize" not in error.value.fix and "does not make" in error.value.fix


def test_one_of_several_models_in_a_file(flux: Path, tmp_path: Path) -> None:
    """Of a checkpoint only the transformer is converted, as only it is written."""
    whole = {f"model.diffusion_model.{key}": t for key, t in _fp8(flux, tmp_path).items()}
    whole |= {f"vae.{key}": t for key, t in load_file(flux / "vae" / WEIGHTS).items()}
    save_file(whole, tmp_path / "all.safetensors")
    export_single_file.quantize_file(tmp_path / "all.safetensors", "int8_row", tmp_path / "one.safetensors")
    assert not any(key.startswith("vae.") for key in load_file(tmp_path / "one.safetensors"))
    assert sdquant.detect(tmp_path / "one.safetensors").quant == "int8_row"


def test_options_are_converted_too(saved: Callable[..., Path], tmp_path: Path, capsys: Capture) -> None:
    """To the same scheme in other blocks; and loading, which converts nothing, says so."""
    _cli("quantize", saved("nf4"), tmp_path / "second", "-q", "nf4,block_size=128")
    said = capsys.readouterr().err
    assert "rounded a second time" in said and "SNR of" in said
    row = next(iter(sdquant.detect(tmp_path / "second").parts["unet"].sources["model"].specs.values()))
    assert row.details["block_size"] == 128
    lines = sdquant.plan(saved("nf4"), "nf4,block_size=128").warnings
    assert any("block_size=128' have no effect on unet" in line for line in lines)
    assert not any("no effect" in line for line in sdquant.plan(saved("nf4"), "nf4,block_size=64").warnings)


def test_markers_stay_with_their_model(flux: Path, tmp_path: Path) -> None:
    """One of a text encoder, or of the whole file, is not written as a weight of the transformer."""
    whole = {f"model.diffusion_model.{key}": t for key, t in _fp8(flux, tmp_path).items()}
    encoder = {"text_encoders.t5xxl.transformer.a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    for marker in ("scaled_fp8", "model.diffusion_model.scaled_fp8", "text_encoders.t5xxl.scaled_fp8"):
        tensors = {**encoder, **whole, marker: torch.zeros(2).to(torch.float8_e4m3fn)}
        tensors |= {f"vae.{key}": t for key, t in load_file(flux / "vae" / WEIGHTS).items()}
        tensors["text_encoders.t5xxl.transformer.a.scale_weight"] = torch.tensor(1.0)
        save_file(tensors, tmp_path / "all.safetensors")
        one = tmp_path / "one.safetensors"
        export_single_file.quantize_file(tmp_path / "all.safetensors", "int8_row", one, overwrite=True, progress=False)
        assert not any("scaled_fp8" in key or "t5xxl" in key for key in load_file(one)), marker
        assert sdquant.verify(one).quant == "int8_row"


def _fp8(flux: Path, folder: Path) -> dict[str, torch.Tensor]:
    file = export_single_file.quantize_file(flux, "fp8", folder / "fp8.safetensors", progress=False)
    return {key: tensor for key, tensor in load_file(file).items() if key != "scaled_fp8"}


PEAK = """
import json, sys, threading, time, torch
from safetensors.torch import save_file
from sdquant.saving import dequantize_to, export_gguf, export_single_file

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def made(name, count, size):
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    rows = {f"blocks.{i}.fc.weight": weight.clone() for i in range(count)}
    save_file(rows | {f"blocks.{i}.fc.weight_scale": torch.tensor(0.01) for i in range(count)}, f"{name}.safetensors")

def convert(name):
    dequantize_to(f"{name}.safetensors", f"{name}-floats.safetensors", progress=False)
    export_single_file.quantize_file(f"{name}.safetensors", "int8_convrot", f"{name}-i8.safetensors", progress=False)
    export_gguf.quantize_file(f"{name}.safetensors", "q8_0", f"{name}.gguf", progress=False)

torch.set_num_threads(1)
made("small", 1, 256)
made("large", 24, 2048)
convert("small")  # imports
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
convert("large")
done.set()
watcher.join()
print(json.dumps({"peak": peak - before, "one": 4 * 2048**2, "all": 24 * 4 * 2048**2}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from Linux' /proc")
def test_one_weight_at_a_time(tmp_path: Path) -> None:
    """Less than four weights as float32 are in memory: one, its codes, and what it is compared with."""
    words = [sys.executable, "-c", PEAK]
    # What is freed goes back at once: what malloc keeps for the next weight depends on the timing of the threads.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["peak"] < 4 * seen["one"] < seen["all"] / 5


class TestRoundingLoss:
    def test_the_ratio(self) -> None:
        weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
        loss, spec = RoundingLoss(), backends.parse("int8_row")
        assert str(loss) == ""
        packed = spec.scheme.codec.encode(weight, spec)
        loss.add(weight, packed)
        error = spec.scheme.codec.decode(packed, torch.float32) - weight
        assert loss.ratios == [pytest.approx(20 * torch.log10(weight.norm() / error.norm()).item(), abs=1e-3)]
        assert f"{loss.ratios[0]:.1f} dB" in str(loss)

    def test_zeros_that_are_none_any_more_have_changed(self) -> None:
        loss = RoundingLoss()
        loss.compare(torch.zeros(2, 2), torch.ones(2, 2))
        assert loss.identical == 0 and "1 of 1 weights" in str(loss)

    @pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
    def test_what_is_not_finite_is_told(self, value: float) -> None:
        loss = RoundingLoss()
        loss.compare(torch.ones(2, 2), torch.full((2, 2), value))
        assert "changed 1 of 1 weights. 1 weights have values that are not finite" in str(loss)

    def test_the_dtype_between_counts(self, saved: Callable[..., Path]) -> None:
        """The weights of the first format are those of float32, not those rounded to bfloat16 in between."""
        src = sdquant.detect(saved("nf4") / "unet").sources["model"]
        floats = with_float_weights(src, "bfloat16")
        name = next(iter(floats.origins))
        with closing_files(floats.open()) as files:
            rounded, exact = (floats.read(files, name, exact=exact) for exact in (False, True))
        assert (rounded.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(exact.bfloat16(), rounded) and not torch.equal(exact, rounded.float())

    def test_what_has_not_changed(self) -> None:
        loss = RoundingLoss()
        loss.compare(torch.ones(2, 2), torch.ones(2, 2))
        loss.compare(torch.zeros(2, 2), torch.zeros(2, 2))
        assert str(loss) == "The second rounding changed none of 2 weights."
        loss.compare(torch.ones(2, 2), torch.full((2, 2), 1.1))
        assert "20.0 dB" in str(loss) and "2 are unchanged" in str(loss)

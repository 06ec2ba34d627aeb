"""A mix in one file for ComfyUI: as small as asked for, read by ComfyUI's rules, and the same when sdquant loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sdquant
from sdquant.cli import main
from sdquant.demo import path
from sdquant.errors import BudgetError, SettingsError
from sdquant.models.pipelines import main_part
from sdquant.nn.weights import plain, quantized
from sdquant.rules import statistics_file
from sdquant.saving import comfy_mix, export_gguf

from . import comfy_safetensors
from .test_mix import _outputs, stats  # noqa: F401

FLUX = path("digits-flux")
SIZE = 3_400_000


@pytest.fixture(autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "comfy-mixes"))


def test_comfyui_reads_it_and_sdquant_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mixed.safetensors"
    assert main(["quantize", "digits-flux", str(file), "-q", f"auto,size={SIZE}", "--no-progress"]) == 0
    assert "a mix of " in capsys.readouterr().out
    assert 0.98 * SIZE <= file.stat().st_size <= SIZE
    floats, packed = comfy_safetensors.read(file)
    assert len(packed) > 10 and sdquant.verify(file).warnings == []
    pipe = sdquant.load_model(file, base=FLUX, progress=False)
    mine = dict(quantized(main_part(pipe)))
    assert len({part.spec.scheme.name for part in mine.values()}) > 2
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, tmp_path / "floats.safetensors")
    theirs = plain(main_part(sdquant.load_model(tmp_path / "floats.safetensors", base=FLUX, progress=False)))
    for name, part in mine.items():
        weight = part.spec.scheme.codec.decode(part, torch.float32)
        assert (weight - theirs[name].float()).norm() < 5e-3 * weight.norm(), name  # sums in another order
    (y,), (z,) = _outputs(sdquant.load_model(FLUX, progress=False)), _outputs(pipe)
    assert float(10 * torch.log10(y.square().sum() / (z - y).square().sum())) > 20


@pytest.mark.slow
def test_with_statistics_it_is_better(stats: Path, tmp_path: Path) -> None:  # noqa: F811
    (y,) = _outputs(sdquant.load_model(FLUX, progress=False))
    ratios = {}
    for name, values in {"measured": {"quant_stats": stats}, "alone": {}}.items():
        given: dict[str, Any] = {"size": SIZE, "progress": False, **values}
        file = comfy_mix.write_comfy_mix(FLUX, "auto", tmp_path / f"{name}.safetensors", **given)
        assert file.stat().st_size <= SIZE
        (z,) = _outputs(sdquant.load_model(file, base=FLUX, progress=False))
        ratios[name] = float(10 * torch.log10(y.square().sum() / (z - y).square().sum()))
    assert ratios["measured"] > ratios["alone"]


def test_what_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with pytest.raises(BudgetError, match=r"ComfyUI file.*as small as 1\.0 MB"):
        comfy_mix.write_comfy_mix(FLUX, "auto", file, size="1MB", progress=False)
    with pytest.raises(SettingsError, match="needs a size or quality"):
        comfy_mix.write_comfy_mix(FLUX, "auto", file, progress=False)
    with pytest.raises(SettingsError, match=r"(?s)another model.*Calibrate this model"):
        _write_by_other_statistics(file)
    with pytest.raises(SettingsError, match="another model"):
        _write_by_other_statistics(file.with_suffix(".gguf"))
    assert not file.exists() and not file.with_suffix(".gguf").exists()


def _write_by_other_statistics(file: Path) -> None:
    other = file.with_name("stats.safetensors")
    values = {"transformer.no_layer.dot_general0_lhs.rows": torch.tensor(1)}
    statistics_file.write_statistics(other, values, {})
    write = export_gguf.quantize_file if file.suffix == ".gguf" else comfy_mix.write_comfy_mix
    write(FLUX, "auto", file, size=SIZE, quant_stats=other, progress=False)


def test_a_size_that_quantizes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "whole.safetensors"
    assert main(["quantize", "digits-flux", str(file), "-q", "auto,size=1GB", "--no-progress"]) == 0
    said = capsys.readouterr().out
    assert f"{file}: not quantized, " in said and "its own node 'Load Diffusion Model'" in said

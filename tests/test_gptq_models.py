"""Codes chosen by what calibration measured: loaded, quantized afterwards, and written to files of other tools."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sdquant
from sdquant.cli import main
from sdquant.demo import path
from sdquant.errors import SettingsError
from sdquant.models import draw
from sdquant.nn import quantized
from sdquant.rules import calibrated_spec, statistics_file
from sdquant.training import digits
from sdquant.training.calibration import Calibration, calibrate
from sdquant.utils.metrics import decibels

MODEL = "digits-flux"


def load(**values: Any) -> Any:
    return sdquant.load_model(path(MODEL), progress=False, **values)


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = tuple(digits.prompt(digit) for digit in range(10))
    task = Calibration(model=MODEL, rules=(), prompts=prompts, steps=4, gradients=0, components=("transformer",))
    out = tmp_path_factory.mktemp("gptq") / "stats.safetensors"
    statistics_file.write_statistics(out, calibrate(load(), task), {})
    return out


@pytest.fixture(scope="module")
def snr() -> Callable[[Any], float]:
    """Return what measures a transformer's output against the float one's, in dB, over images of other prompts."""
    pipe, calls = load(), []
    handle = pipe.transformer.register_forward_pre_hook(lambda _, __, k: calls.append(k), with_kwargs=True)
    for digit in (0, 5, 9):
        draw(pipe, [digits.prompt(digit)], seeds=[100 + digit], steps=3)
    handle.remove()

    def outputs(model: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(**{**call, "return_dict": False})[0].float().flatten() for call in calls])

    exact = outputs(pipe.transformer)

    def measure(model: Any) -> float:
        return decibels(float(exact.square().sum()), float((outputs(model) - exact).square().sum()))

    return measure


@pytest.mark.parametrize("scheme", ["int4", "sdnq-uint4,hadamard", "nf4", "comfy:nvfp4"])
def test_it_draws_nearer_to_the_floats(scheme: str, stats: Path, snr: Callable[[Any], float]) -> None:
    options = {"components": ["transformer"], "runtime": "plain"}
    plain = load(quant=scheme, **options)
    better = load(quant=f"{scheme},gptq", quant_stats=stats, **options)
    assert snr(better.transformer) > snr(plain.transformer) + 1.5
    assert better.sdquant.plan.bytes == plain.sdquant.plan.bytes


def test_afterwards_saved_and_offloaded(stats: Path, tmp_path: Path) -> None:
    values = {"quant": "int4,gptq", "quant_stats": stats, "components": ["transformer"]}
    pipe = load(**values)
    codes = {name: packed.parts for name, packed in quantized(pipe.transformer)}
    post = sdquant.quantize(load(), progress=False, **values)
    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", progress=False)
    offloaded = load(offload="balanced", budget="3MB", **values)
    with_others = sdquant.save(offloaded, tmp_path / "offloaded")
    reread = sdquant.load_model(with_others, progress=False)
    for other in (post, again, reread):
        found = {name: packed.parts for name, packed in quantized(other.transformer)}
        assert found.keys() == codes.keys()
        assert all(torch.equal(found[name][part], codes[name][part]) for name in codes for part in codes[name])


@pytest.mark.parametrize(
    ("scheme", "more", "file"),
    [
        ("q4_k_m", "gptq", "model.gguf"),
        ("q3_k", "gptq,imatrix", "model.gguf"),
        ("iq3_s", "imatrix", "model.gguf"),
        ("nf4", "gptq", "model.safetensors"),
        ("comfy:nvfp4", "gptq", "model.safetensors"),
    ],
)
def test_files_of_other_tools(
    scheme: str, more: str, file: str, stats: Path, snr: Callable[[Any], float], tmp_path: Path
) -> None:
    """In the same bytes, under names that other tools read."""
    found = []
    for name, options in (("plain", ()), ("better", ("--quant-stats", str(stats)))):
        out = tmp_path / name / file
        out.parent.mkdir()
        quant = f"{scheme},{more}" if options else scheme
        assert main(["quantize", str(path(MODEL)), str(out), "-q", quant, "--no-progress", *options]) == 0
        loaded = sdquant.load_model(out, base=path(MODEL), progress=False, runtime="plain")
        found.append((out.stat().st_size, snr(loaded.transformer)))
    (plain_size, plain), (size, better) = found
    assert size == plain_size
    assert better > plain + (2 if "gptq" in more else 0.3)


@pytest.mark.parametrize("scheme", ["int4,gptq", "q4_k,imatrix"])
def test_it_needs_what_calibration_found(scheme: str) -> None:
    with pytest.raises(SettingsError, match=r"(?s)without statistics.*sdquant calibrate"):
        load(quant=scheme)


def test_layers_that_calibration_does_not_know(stats: Path) -> None:
    with pytest.raises(SettingsError, match=r"(?s)knows no such layer.*sdquant calibrate"):
        load(quant="int4,gptq", quant_stats=stats, components=["text_encoder_2"])


def test_where_it_changes_nothing_it_says_so(
    stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the plan, which is logged by what loads; and by what writes files."""
    values = {"components": ["transformer"], "quant_stats": stats}
    assert not [line for line in sdquant.plan(path(MODEL), quant="int4,gptq", **values).warnings if "gptq" in line]
    monkeypatch.setattr(calibrated_spec, "without_effect", lambda spec, shape: [("gptq", "of a test")])
    (line,) = [one for one in sdquant.plan(path(MODEL), quant="int4,gptq", **values).warnings if "gptq" in one]
    assert re.fullmatch(r"transformer: gptq changes nothing in \d+ weights \(\S+, \S+, \S+, \.\.\.\): of a test", line)
    for quant, name in (("comfy:nvfp4,gptq", "a.safetensors"), ("q4_0,gptq", "a.gguf")):
        caplog.clear()
        more = ["--quant-stats", str(stats), "--no-progress"]
        assert main(["quantize", str(path(MODEL)), str(tmp_path / name), "-q", quant, *more]) == 0
        assert "changes nothing in" in caplog.text, name


def test_magnitudes_that_are_not_finite_are_refused(stats: Path, tmp_path: Path) -> None:
    values, bad = dict(statistics_file.read_statistics(stats)), tmp_path / "bad.safetensors"
    name = next(key for key in values if key.endswith(".sum_of_absmax"))
    values[name] = torch.full_like(values[name], torch.inf)
    statistics_file.write_statistics(bad, values, {})
    with pytest.raises(SettingsError, match="infinite or not a number"):
        sdquant.plan(path(MODEL), quant="svdq-int4", components=["transformer"], quant_stats=bad)

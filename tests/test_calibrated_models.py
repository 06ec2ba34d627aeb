"""Codes, ranges and biases chosen by what calibration measured: loaded, quantized afterwards, and written to files of
other tools."""

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
from sdquant.rules import ComponentStatistics, calibrated_spec, statistics_file
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
        ("nf4", "range", "model.safetensors"),
        ("comfy:nvfp4", "range", "model.safetensors"),
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


@pytest.mark.parametrize(
    ("scheme", "least"),
    [("nf4,range", 0.3), ("int4,range", 0.3), ("comfy:nvfp4,range", 1.0), ("qint3,range", 1.0), ("qint3,bias", 0.3)],
)
def test_ranges_and_biases_are_nearer_to_the_floats(
    scheme: str, least: float, stats: Path, snr: Callable[[Any], float]
) -> None:
    options = {"components": ["transformer"], "runtime": "plain"}
    plain = load(quant=scheme.partition(",")[0], **options)
    better = load(quant=scheme, quant_stats=stats, **options)
    assert snr(better.transformer) > snr(plain.transformer) + least
    assert better.sdquant.plan.bytes == plain.sdquant.plan.bytes


def biases_of(model: Any) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters() if name.endswith(".bias")}


def test_biases_make_up_for_errors_of_their_weights(stats: Path, tmp_path: Path) -> None:
    """By what the file says of mean inputs, however they are quantized, kept and written."""
    values = {"quant": "nf4,bias", "quant_stats": stats, "components": ["transformer"]}
    floats, pipe = load().transformer, load(**values).transformer
    packed, known = dict(quantized(pipe)), ComponentStatistics(str(stats), "transformer")
    before, found = biases_of(floats), biases_of(pipe)
    changed = {name.removesuffix(".bias") for name in before if not torch.equal(before[name], found[name])}
    assert changed == {name.removesuffix(".weight") for name in packed} & {
        name.removesuffix(".bias") for name in before
    }
    assert len(changed) > 10
    for name in changed:
        mean = known[name].mean_input
        assert mean is not None
        row = packed[f"{name}.weight"]
        errors = row.spec.scheme.codec.decode(row, torch.float32) - floats.get_submodule(name).weight.float()
        expected = before[f"{name}.bias"].float() - errors.flatten(1) @ mean
        torch.testing.assert_close(found[f"{name}.bias"].float(), expected, rtol=0.01, atol=2e-4)

    post = sdquant.quantize(load(), progress=False, **values).transformer
    plain = load(**values, runtime="plain").transformer
    cached = [load(**values, cache=tmp_path / "cache").transformer for _ in range(2)]
    sdquant.save(load(**values), tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", progress=False).transformer
    for other in (post, plain, *cached, again):
        there = biases_of(other)
        assert all(torch.equal(there[name], found[name]) for name in found)

    out = tmp_path / "model.safetensors"
    arguments = ["quantize", str(path(MODEL)), str(out), "-q", "comfy:nvfp4,bias", "--no-progress"]
    assert main([*arguments, "--quant-stats", str(stats), "--components", "transformer"]) == 0
    written = biases_of(sdquant.load_model(out, base=path(MODEL), progress=False).transformer)
    loaded = biases_of(load(**{**values, "quant": "comfy:nvfp4,bias"}).transformer)
    assert [name for name in loaded if not torch.equal(loaded[name], before[name])]
    assert all(torch.equal(written[name], loaded[name]) for name in loaded)


def test_statistics_without_mean_inputs(stats: Path, tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    old = tmp_path / "old.safetensors"
    tensors = {name: statistics_file.read_tensor(stats, name) for name in statistics_file.names_in(stats)}
    kept = {name: value for name, value in tensors.items() if not name.endswith(".total")}
    assert len(kept) < len(tensors)
    statistics_file.write_statistics(old, kept, {})
    with pytest.raises(SettingsError, match=r"(?s)earlier sdquant.*sdquant calibrate"):
        load(quant="nf4,bias", quant_stats=old, components=["transformer"])
    load(quant="nf4,range,gptq", quant_stats=old, components=["transformer"])


@pytest.mark.parametrize("scheme", ["int4,gptq", "q4_k,imatrix", "nf4,bias"])
def test_it_needs_what_calibration_found(scheme: str) -> None:
    with pytest.raises(SettingsError, match=r"(?s)without statistics.*sdquant calibrate"):
        load(quant=scheme)


def test_diffusers_and_hosts_need_it_too(stats: Path) -> None:
    """A saved model with such codes needs nothing; and biases are those that `load_model` makes."""
    from diffusers import FluxTransformer2DModel

    from sdquant.hosts.comfy_load import checked

    folder = path(MODEL) / "transformer"
    for quant in ("nf4,gptq", "nf4,bias"):
        with pytest.raises(SettingsError, match=r"(?s)without statistics.*sdquant calibrate"):
            FluxTransformer2DModel.from_pretrained(folder, quantization_config=sdquant.Config(quant))
        with pytest.raises(SettingsError, match=r"(?s)without statistics.*sdquant calibrate"):
            checked(quant, "cpu")
    config = sdquant.Config("nf4,bias", quant_stats=stats, component="transformer")
    model = FluxTransformer2DModel.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    expected = biases_of(load(quant="nf4,bias", quant_stats=stats, components=["transformer"]).transformer)
    found = biases_of(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("scheme", ["int4,gptq", "nf4,bias", "svdq-int4"])
def test_embeddings_are_not_measured(scheme: str, tmp_path: Path) -> None:
    """They are quantized as without statistics."""
    task = Calibration(
        model=MODEL, rules=(), prompts=(digits.prompt(3),), steps=1, gradients=0, components=("text_encoder",)
    )
    out = tmp_path / "stats.safetensors"
    statistics_file.write_statistics(out, calibrate(load(), task), {})
    options = {"components": ["text_encoder"], "runtime": "plain"}
    found = dict(quantized(load(quant=f"{scheme},embeddings", quant_stats=out, **options).text_encoder))
    plain = dict(quantized(load(quant=f"{scheme.partition(',')[0]},embeddings", **options).text_encoder))
    tables = [name for name in plain if "embedding" in name]
    assert tables and found.keys() == plain.keys()
    for table in tables:
        assert all(torch.equal(found[table].parts[part], value) for part, value in plain[table].parts.items())


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

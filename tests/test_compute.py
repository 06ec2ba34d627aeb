"""compute="int8" and "fp8": asked for, planned, refused, and what the first changes and leaves alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sdquant
from sdquant import cli, compat
from sdquant.errors import ConflictError, IncompatibleError, SettingsError
from sdquant.integrations.config import Config
from sdquant.kernels import int8_linear
from sdquant.nn.quantized_layers import QuantizedLayer

from .compat.machines import EVERYTHING
from .offload.conftest import draw


@pytest.fixture(autouse=True)
def from_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers at any size: the shipped models are small."""
    for name in ("BY_C", "BY_AMX", "BY_AVX2", "BY_TORCH"):
        monkeypatch.setattr(int8_linear, name, int8_linear.Least(rows=1, again=1, channels=1, columns=1))


@pytest.fixture(scope="module")
def pipe(sd: Path) -> Iterator[Any]:
    """The shipped model in int8, with products in integers. Do not change it."""
    yield sdquant.load_model(sd, "int8", compute="int8", progress=False)


def layers(pipe: Any) -> list[QuantizedLayer]:
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return [layer for part in parts for layer in part.modules() if isinstance(layer, QuantizedLayer)]


def step(pipe: Any) -> torch.Tensor:
    """One call of the UNet."""
    unet = pipe.unet
    torch.manual_seed(0)
    size = unet.config.sample_size
    latents = torch.randn(1, unet.config.in_channels, size, size, dtype=unet.dtype)
    text = torch.randn(1, 12, unet.config.cross_attention_dim, dtype=unet.dtype)
    with torch.no_grad():
        out: torch.Tensor = unet(latents, torch.tensor(500), encoder_hidden_states=text).sample
    return out.float()


def decibels(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (got - wanted).square().sum()))


def test_layers_compute_as_asked(pipe: Any, sd: Path) -> None:
    assert layers(pipe) and all(layer.compute == "int8" for layer in layers(pipe))
    assert "compute=int8" in repr(layers(pipe)[0])
    exact = sdquant.load_model(sd, "int8", compute="float", progress=False)
    assert all(layer.compute is None for layer in layers(exact))
    assert 25 < decibels(step(pipe), step(exact)) < 60  # other sums, and near
    assert sum(part.bytes for part in pipe.sdquant.plan.components) == sum(
        part.bytes for part in exact.sdquant.plan.components
    )


def test_a_library_scheme_gets_plain_layers(sd: Path) -> None:
    made = sdquant.plan(sd, "nf4", compute="int8")
    (unet,) = (part for part in made.components if part.name == "unet")
    assert (unet.runtime, unet.compute) == ("plain", "int8")
    assert unet.to_dict()["compute"] == "int8"
    (unet,) = (part for part in sdquant.plan(sd, "nf4", runtime="library").components if part.name == "unet")
    assert (unet.runtime, unet.compute, unet.to_dict()["compute"]) == ("library", None, "float")


def test_the_librarys_modules_are_refused(sd: Path) -> None:
    with pytest.raises(IncompatibleError, match='runtime="plain"'):
        sdquant.load_model(sd, "nf4", runtime="library", compute="int8")
    with pytest.raises(IncompatibleError, match='runtime="plain"'):
        sdquant.check("qint8", runtime="library", compute="int8")
    sdquant.check("qint8", runtime="plain", compute="int8")
    for device in ("mps", "xpu"):
        with pytest.warns(compat.UntestedWarning, match="no effect on this device"):
            sdquant.check("int8", compute="int8", device=device)


def test_no_such_compute(sd: Path) -> None:
    with pytest.raises(SettingsError, match="'int8'"):
        sdquant.plan(sd, "int8", compute="int9")
    with pytest.raises(SettingsError, match="float, int8, fp8, fp4"):
        sdquant.check("int8", compute="fp2")
    with pytest.raises(SettingsError, match="float, int8, fp8, fp4"):
        Config("int8", compute="fp2")


def test_8_bit_floats_are_for_cards(sd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("cpu", "mps"):
        with pytest.raises(IncompatibleError, match='Use compute="int8"'):
            sdquant.check("nf4", compute="fp8", device=device, machine=EVERYTHING)
    with pytest.raises(IncompatibleError, match='runtime="plain"'):
        sdquant.check("nf4", runtime="library", compute="fp8", device="cuda", machine=EVERYTHING)
    sdquant.check("nf4", compute="fp8", device="cuda", machine=EVERYTHING)
    with pytest.warns(compat.UntestedWarning, match="nobody has run it on such a card"):
        sdquant.check("nf4", compute="fp8", device="rocm", machine=EVERYTHING)
    assert cli.main(["plan", str(sd), "--quant", "nf4", "--compute", "fp8", "--device", "cpu"]) == 2
    assert "products of 8-bit floats need a card" in capsys.readouterr().err


def test_on_a_cpu_they_have_no_effect(sd: Path) -> None:
    with pytest.warns(compat.IncompatibleWarning, match="8-bit floats"):
        made = sdquant.load_model(sd, "nf4", compute="fp8", device="cpu", allow_incompatible=True, progress=False)
    exact = sdquant.load_model(sd, "nf4", runtime="plain", progress=False)
    assert all(layer.compute == "fp8" for layer in layers(made))
    assert torch.equal(step(made), step(exact))


def test_rules_that_say_how_they_compute_in_floats(sd: Path) -> None:
    with pytest.raises(ConflictError, match="act_qtype"):
        sdquant.quantize(
            torch.nn.Sequential(torch.nn.Linear(64, 64)),
            rules=[{"weight_qtype": "int8", "act_qtype": "int8"}],
            compute="fp8",
        )


def test_rules_that_say_how_they_compute(sd: Path) -> None:
    rules = [{"weight_qtype": "int8", "act_qtype": "int8"}]
    for ask in (
        lambda: sdquant.plan(sd, rules=rules, compute="int8"),
        lambda: sdquant.quantize(torch.nn.Sequential(torch.nn.Linear(64, 64)), rules=rules, compute="int8"),
        lambda: Config(rules=rules, compute="int8"),
    ):
        with pytest.raises(ConflictError, match="act_qtype"):
            ask()
    stored = sdquant.plan(sd, rules=[{"weight_qtype": "int8"}], compute="int8")
    assert any(part.compute == "int8" for part in stored.components)


def test_without_quantized_weights_it_says_so(sd: Path) -> None:
    assert any("compute='int8' has no effect" in line for line in sdquant.plan(sd, compute="int8").warnings)
    assert not any("compute" in line for line in sdquant.plan(sd, "int8", compute="int8").warnings)


def test_saved_it_is_what_it_was(pipe: Any, sd: Path, tmp_path: Path) -> None:
    sdquant.save(pipe, tmp_path / "ints")
    sdquant.save(sdquant.load_model(sd, "int8", progress=False), tmp_path / "floats")
    for file in sorted((tmp_path / "floats").rglob("*")):
        other = tmp_path / "ints" / file.relative_to(tmp_path / "floats")
        assert file.is_dir() or file.read_bytes() == other.read_bytes(), file
    again = sdquant.load_model(tmp_path / "ints", compute="int8", progress=False)
    assert torch.equal(step(again), step(pipe))
    assert all(layer.compute is None for layer in layers(sdquant.load_model(tmp_path / "ints", progress=False)))


def test_copies_and_casts_compute_alike(pipe: Any) -> None:
    unet = copy.deepcopy(pipe.unet)
    assert all(layer.compute == "int8" for layer in unet.modules() if isinstance(layer, QuantizedLayer))
    wanted, own = step(pipe), pipe.unet
    try:
        pipe.unet = unet
        assert torch.equal(step(pipe), wanted)
        pipe.unet = unet.to(torch.float32)
        assert decibels(wanted, step(pipe)) > 30
    finally:
        pipe.unet = own
    layer = layers(pipe)[0]
    assert layer.weight.shape == torch.Size(layer.spec.shape) and layer.weight.float().isfinite().all()


_SLOW = (pytest.param(mode, marks=pytest.mark.slow) for mode in ("model", "group"))


@pytest.mark.parametrize("mode", ["sequential", "balanced", *_SLOW])
def test_every_offload_mode_draws_the_same(mode: str, pipe: Any, sd: Path) -> None:
    more: dict[str, Any] = {"budget": int(0.6 * pipe.sdquant.plan.bytes)} if mode == "balanced" else {}
    moved = sdquant.load_model(sd, "int8", mode, compute="int8", progress=False, **more)
    assert (draw(moved) == draw(pipe)).all()
    moved.sdquant.offload.remove()


def test_quantize_in_place(sd: Path, pipe: Any) -> None:
    made = sdquant.quantize(sdquant.load_model(sd, progress=False), "int8", compute="int8", progress=False)
    assert torch.equal(step(made), step(pipe))


def test_config_for_diffusers(sd: Path, pipe: Any) -> None:
    from diffusers import UNet2DConditionModel

    config = Config("int8", compute="int8")
    assert Config.from_dict(config.to_dict()) == config and config.to_dict()["compute"] == "int8"
    assert "compute" not in config.saved().to_dict()
    unet = UNet2DConditionModel.from_pretrained(sd / "unet", quantization_config=config, torch_dtype=pipe.unet.dtype)
    own = pipe.unet
    wanted = step(pipe)
    try:
        pipe.unet = unet
        assert torch.equal(step(pipe), wanted)
    finally:
        pipe.unet = own


def test_command_line(sd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(sd), "--quant", "nf4", "--compute", "int8"]) == 0
    assert "plain, int8" in capsys.readouterr().out
    assert cli.main(["plan", str(sd), "--quant", "nf4", "--compute", "int8", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["components"]
    assert {part["compute"] for part in parts if part["quantized_weights"]} == {"int8"}
    assert cli.main(["plan", str(sd), "--quant", "nf4", "--compute", "int8", "--runtime", "library"]) == 2
    assert "--runtime plain" in capsys.readouterr().err

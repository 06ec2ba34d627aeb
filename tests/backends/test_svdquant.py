"""Making SVDQuant: what it is better than, smoothing by calibration, on the fly and after loading, saved again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import sdquant
from sdquant import backends
from sdquant.cli import main
from sdquant.core.backend import QuantSpec, Unfit
from sdquant.demo import path
from sdquant.errors import BadFileError, IncompatibleError, SettingsError
from sdquant.models.quantize_weight import encode
from sdquant.nn.weights import quantized
from sdquant.rules.statistics_file import write_statistics
from sdquant.training import digits
from sdquant.training.calibration import Calibration, calibrate

INT4, NVFP4 = "svdquant_w4a4", "svdquant_nvfp4"
PROMPTS = tuple(digits.prompt(digit) for digit in (3, 7))


class Measured(QuantSpec):
    """A scheme whose inputs have these magnitudes."""

    def magnitudes(self, inputs: int) -> Tensor:
        return INPUTS["low"].abs().amax(dim=0)


def _weights() -> dict[str, Tensor]:
    """As in bench/outliers.py, smaller: heavy tails, and beside them a part of low rank with as much energy."""
    torch.manual_seed(1)
    heavy = torch.distributions.StudentT(4.0).sample((384, 512)) * 0.014
    low = torch.randn(384, 16) @ torch.randn(16, 512)
    return {"heavy": heavy, "low": heavy + low * (heavy.norm() / low.norm())}


def _inputs() -> Tensor:
    torch.manual_seed(2)
    x = torch.distributions.StudentT(4.0).sample((64, 512))
    x[:, torch.randperm(512)[:4]] *= 20
    return x


WEIGHTS, INPUTS = _weights(), {"low": _inputs()}


def _decibels(found: Tensor, exact: Tensor) -> float:
    return float(10 * torch.log10(exact.square().sum() / (found - exact).square().sum()))


def _decoded(scheme: str | QuantSpec, weight: Tensor) -> Tensor:
    spec = backends.parse(scheme) if isinstance(scheme, str) else scheme
    return spec.scheme.codec.decode(spec.scheme.codec.encode(weight, spec), torch.float32)


@pytest.mark.parametrize("scheme", ["svdq-int4", "svdq-nvfp4"])
def test_branch_and_smoothing_are_better_than_codes_alone(scheme: str) -> None:
    spec, plain = backends.parse(scheme), {"svdq-int4": "int4,group_size=64", "svdq-nvfp4": "comfy:nvfp4"}[scheme]
    x = INPUTS["low"]
    for case, gain in (("heavy", 0.0), ("low", 1.0)):
        weight = WEIGHTS[case]
        codes, branch, both = (
            _decibels(x @ _decoded(one, weight).T, x @ weight.T)
            for one in (plain, spec, Measured(spec.scheme, spec.options))
        )
        assert branch > codes + gain and both > branch + 1.5, case
    assert _decibels(_decoded(f"{scheme},rank=64", weight), weight) > _decibels(_decoded(spec, weight), weight) + 0.5


def test_the_branch_is_that_of_the_exact_svd() -> None:
    """But for a few hundredths of a decibel, and the rounding to 16 bits."""
    weight = WEIGHTS["low"]
    packed = backends.get("comfy").encode(weight, backends.parse("svdq-int4"))
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    exact, made = (u[:, :32] * s[:32]) @ v[:32], packed.parts["up"].float() @ packed.parts["down"].float().T
    assert (weight - made).norm() < 1.005 * (weight - exact).norm()


def test_the_same_whatever_random_numbers_were_drawn_before() -> None:
    spec, weight = backends.parse("svdq-int4"), WEIGHTS["low"]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = backends.get("comfy").encode(weight, spec)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    other = backends.get("comfy").encode(weight, spec)
    assert all(torch.equal(part, other.parts[name]) for name, part in one.parts.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_parts_have_16_bits(dtype: torch.dtype) -> None:
    spec = backends.parse("svdq-nvfp4,rank=16")
    packed = spec.scheme.codec.encode(WEIGHTS["heavy"].to(dtype), spec)
    floats = torch.float16 if dtype == torch.float16 else torch.bfloat16
    assert {packed.parts[name].dtype for name in ("smooth", "down", "up")} == {floats}
    factor = packed.spec.details["factor"]
    assert torch.tensor(factor, dtype=floats).item() == factor


def test_what_does_not_fit_is_said() -> None:
    for shape, word in (
        ((256, 96), "a multiple of 64"),
        ((64, 64), "would hardly be smaller"),
        ((8, 8, 3, 3), "for linear layers"),
    ):
        with pytest.raises(Unfit, match=word):
            backends.get("comfy").layout(backends.parse("svdq-int4"), shape, "bfloat16")
    with pytest.raises(SettingsError, match="rank of the branch"):
        backends.parse("svdq-int4,rank=20")
    broken = WEIGHTS["heavy"].clone()
    broken[5, 7] = torch.nan
    for scheme in ("svdq-int4", "svdq-nvfp4"):
        for value in (torch.nan, torch.inf):
            broken[5, 7] = value
            with pytest.raises(BadFileError, match="NaN, infinite"):
                encode("proj.weight", broken, backends.parse(scheme))


@pytest.fixture(scope="module")
def magnitudes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes."""
    file = tmp_path_factory.mktemp("calibrated") / "inputs.safetensors"
    words = [str(path("digits-flux")), "-q", "svdq-int4", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]
    size = ["--steps", "2", "--width", str(digits.SIZE), "--height", str(digits.SIZE)]
    assert main(["calibrate", *words, *size, "--components", "transformer", "-o", str(file)]) == 0
    return file


def test_calibrated(magnitudes: Path) -> None:
    """The means of the largest numbers that come into each layer, by input, as hooks of one's own see them."""
    found = load_file(magnitudes)
    pipe = sdquant.load_model(path("digits-flux"), progress=False)
    name, seen = "single_transformer_blocks.0.proj_out", []
    layer = pipe.transformer.get_submodule(name)
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs().flatten(0, -2).amax(0).float()))
    task = Calibration(
        model="", rules=(), quant="svdq-int4", prompts=PROMPTS, steps=2, width=digits.SIZE, height=digits.SIZE,
        components=("transformer",),
    )  # fmt: skip
    again = calibrate(pipe, task)
    assert all(torch.equal(found[key], value) for key, value in again.items()) and found.keys() == again.keys()
    key = f"transformer.{name}.dot_general0_lhs"
    assert int(found[f"{key}.count"]) == len(seen) == 4
    assert torch.allclose(found[f"{key}.sum_of_absmax"].flatten(), torch.stack(seen).sum(0), rtol=1e-5)


def test_smoothed_as_calibrated(magnitudes: Path, tmp_path: Path) -> None:
    """While loading, after it, and by the command, saved and loaded again: the same bits."""
    given: dict[str, Any] = {"components": ("transformer",), "progress": False}
    pipe = sdquant.load_model(path("digits-flux"), "svdq-int4", quant_stats=magnitudes, **given)
    mine = dict(quantized(pipe.transformer))
    assert len(mine) > 20 and all(bool((packed.parts["smooth"] != 1).any()) for packed in mine.values())
    after = sdquant.quantize(
        sdquant.load_model(path("digits-flux"), progress=False), "svdq-int4", quant_stats=magnitudes, **given
    )
    sdquant.save(pipe, tmp_path / "saved")
    again = sdquant.load_model(tmp_path / "saved", progress=False)
    for other in (after, again):
        packs = dict(quantized(other.transformer))
        assert packs.keys() == mine.keys()
        for name, packed in mine.items():
            assert packs[name].spec == packed.spec
            assert all(torch.equal(packs[name].parts[part], value) for part, value in packed.parts.items()), name
    without = dict(quantized(sdquant.load_model(path("digits-flux"), "svdq-int4", **given).transformer))
    assert all(bool((packed.parts["smooth"] == 1).all()) for packed in without.values())
    sdquant.save(again, tmp_path / "again")
    one, other = (
        load_file(tmp_path / name / "transformer" / "diffusion_pytorch_model.safetensors")
        for name in ("saved", "again")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    twin = copy.deepcopy(again.transformer)
    assert dict(quantized(twin)).keys() == mine.keys()


def test_statistics_that_do_not_fit(magnitudes: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="use what calibration found"):
        sdquant.load_model(path("digits-flux"), "int8", quant_stats=magnitudes)
    with pytest.raises(SettingsError, match=r"knows no such layer.*components="):  # the text encoders were not seen
        sdquant.load_model(path("digits-flux"), "svdq-int4", quant_stats=magnitudes)
    found = load_file(magnitudes)
    key = next(key for key in found if key.endswith("blocks.0.proj_out.dot_general0_lhs.sum_of_absmax"))
    write_statistics(tmp_path / "other.safetensors", {**found, key: found[key][..., :1].contiguous()}, {})
    with pytest.raises(SettingsError, match="1 magnitudes for its"):
        sdquant.plan(
            path("digits-flux"), "svdq-int4", quant_stats=tmp_path / "other.safetensors", components=("transformer",)
        )
    with pytest.raises(SettingsError, match="it uses nothing that calibration"):
        Calibration(model="", rules=(), quant="int8", prompts=PROMPTS)


@pytest.mark.parametrize("std", [1e-5, 1e-4])
def test_small_weights_in_float16(std: float) -> None:
    """float16 has smaller scales than its least normal number."""
    weight = (WEIGHTS["heavy"] / WEIGHTS["heavy"].std() * std).half()
    assert _decibels(_decoded("svdq-int4", weight), weight.float()) > 17


@pytest.mark.parametrize("scheme", ["svdq-int4", "svdq-nvfp4"])
def test_smoothing_fits_float16(scheme: str) -> None:
    class Extreme(QuantSpec):
        def magnitudes(self, inputs: int) -> Tensor:
            return torch.cat([torch.full((1,), 1e2), torch.full((inputs - 1,), 1e-3)])

    spec, weight = backends.parse(scheme), torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) - 0.5
    weight[:, 0] *= 2e-5
    packed = encode("proj.weight", weight.half(), Extreme(spec.scheme, spec.options))
    assert bool(packed.parts["smooth"].isfinite().all()) and float(packed.parts["smooth"].max()) > 6e4


def test_what_the_librarys_runtime_is(sd: Path) -> None:
    """comfy-kitchen's, or Nunchaku's where there is a card for them; the plan and the error say which."""
    given: dict[str, Any] = {"runtime": "library", "components": ("unet",), "device": "cpu"}
    (line,) = sdquant.plan(sd, "svdq-int4", **given).warnings
    assert "comfy-kitchen's kernels, not with Nunchaku's: Nunchaku's kernels are for NVIDIA's cards" in line
    with pytest.raises(IncompatibleError, match=r"comfy-kitchen has no kernels for it, and Nunchaku's are for NVIDIA"):
        sdquant.plan(sd, "svdq-nvfp4", **given)

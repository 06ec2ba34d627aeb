"""Ranges that leave less error than those of the largest weights, in the formats of every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sdquant
from sdquant import backends
from sdquant.backends import _range_search, without_effect
from sdquant.core import Packed, QuantSpec, registry
from sdquant.utils.metrics import decibels

from .test_gptq import COLUMNS, Calibrated, correlated, normal

# Decibels that it brings at least to weights that are normally distributed.
SCHEMES = {
    "nf4": 0.4, "nf4,double_quant": 0.4, "nf4,block_size=128": 0.3, "fp4": 0.4, "comfy:nvfp4": 1.0, "int4": 0.3,
    "int4,group_size=32": 0.3, "int4,group_size=-1": 0.7, "int4_sym": 0.3, "qint4": 0.6, "qint3": 1.1, "qint2": 2.5,
    "sdnq-int4": 0.6, "sdnq-uint4": 0.5, "sdnq-uint3": 1.0, "sdnq-uint4,hadamard": 0.5, "sdnq-uint4,svd,rank=16": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return normal()


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    return correlated(0.5)


def noise(packed: Packed, weight: Tensor) -> float:
    """Return the mean square of the errors of a packed weight, relative to the weight's."""
    errors = packed.spec.scheme.codec.decode(packed, torch.float32) - weight.float()
    return float(errors.square().sum() / weight.float().square().sum())


@pytest.mark.parametrize(("scheme", "least"), SCHEMES.items())
def test_weights_are_nearer_in_the_same_bytes(scheme: str, least: float, weight: Tensor) -> None:
    plain, better = (backends.encode(weight, registry.parse(f"{scheme}{option}")) for option in ("", ",range"))
    assert decibels(noise(plain, weight), noise(better, weight)) > least
    assert better.spec.details.keys() == plain.spec.details.keys() and better.spec.shape == plain.spec.shape
    assert {name: (part.dtype, part.shape) for name, part in better.parts.items()} == {
        name: (part.dtype, part.shape) for name, part in plain.parts.items()
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_outputs_are_nearer_with_statistics(scheme: str, weight: Tensor, inputs: Tensor) -> None:
    seen, unseen = inputs[:1536], inputs[1536:]
    moments = (seen.T @ seen / len(seen)).unsqueeze(0)
    exact = unseen @ weight.float().T

    def snr(options: str) -> float:
        spec = registry.parse(scheme + options)
        packed = backends.encode(weight, Calibrated(spec.scheme, spec.options, moments=moments))
        found = unseen @ spec.scheme.codec.decode(packed, torch.float32).T
        return decibels(float(exact.square().mean()), float((found - exact).square().mean()))

    assert snr(",range") > snr("") + 0.8
    assert snr(",range,gptq") > snr(",gptq") - 0.1


def scales_by_trial(groups: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Return the least squared error of each group [n, g], of all these scales [k] for codes of `table`: [n]."""
    least = torch.full((len(groups),), torch.inf)
    for scale in scales.tolist():
        positions = groups / scale
        nearest = table[(positions.unsqueeze(2) - table).abs().argmin(2)]
        least = torch.minimum(least, (nearest * scale - groups).square().sum(1))
    return least


def test_scales_of_nvfp4_are_nearly_the_best_that_there_are(weight: Tensor) -> None:
    """Of all scales that float8 has, with the weight's own factor."""
    spec = registry.parse("comfy:nvfp4,range")
    packed, plain = (backends.encode(weight, one) for one in (spec, QuantSpec(spec.scheme)))
    e4m3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    factor = weight.float().abs().max() / (448 * 6)
    steps = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    table = torch.tensor([*steps, *(-step for step in steps[1:])])
    groups = weight.float().view(-1, 16)
    best = float(scales_by_trial(groups, e4m3 * factor, table).sum() / weight.float().square().sum())
    assert best < 0.999 * noise(packed, weight)  # the search does not try all
    assert decibels(noise(packed, weight), best) < 0.3 < 1.3 < decibels(noise(plain, weight), best)


def test_chunks_do_not_matter(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one scale is for the whole weight."""
    loud = weight.clone()
    loud[37, 100] = 0.3
    for scheme in ("comfy:nvfp4,range", "int4,range", "qint4,range"):
        spec = registry.parse(scheme)
        whole = backends.encode(loud, spec)
        with monkeypatch.context() as patch:
            patch.setattr(_range_search, "_WEIGHTS_AT_ONCE", 8 * COLUMNS)
            in_chunks = backends.encode(loud, spec)
        assert all(
            torch.equal(whole.parts[name].view(torch.uint8), in_chunks.parts[name].view(torch.uint8))
            for name in whole.parts
        )


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
@pytest.mark.parametrize("scheme", ["nf4", "comfy:nvfp4", "int4", "qint4", "sdnq-uint4"])
def test_weights_that_are_all_alike(scheme: str, value: float) -> None:
    weight = torch.full((32, 128), value, dtype=torch.bfloat16)
    plain, better = (backends.encode(weight, registry.parse(f"{scheme}{option}")) for option in ("", ",range"))
    errors = [float((one.spec.scheme.codec.decode(one, torch.float32) - value).abs().max()) for one in (plain, better)]
    assert errors[1] <= errors[0]


@pytest.mark.parametrize("shape", [(64, 512), (64, 96), (64, 64, 3, 3), (32, 128, 1, 1)])
@pytest.mark.parametrize(
    "scheme",
    ["nf4", "fp4", "nf4,block_size=128", "qint4", "qint3", "int4", "sdnq-uint4", "sdnq-uint4,svd,rank=16"],
)
def test_where_it_changes_nothing(scheme: str, shape: tuple[int, ...]) -> None:
    """What is said of it is what the encoders do."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    spec = registry.parse(f"{scheme},range")
    plain, better = (backends.encode(weight, one) for one in (registry.parse(scheme), spec))
    same = all(
        torch.equal(plain.parts[name].view(torch.uint8), better.parts[name].view(torch.uint8)) for name in plain.parts
    )
    assert same == bool([name for name, _ in without_effect(spec, shape) if name == "range"])


def test_a_model_needs_no_statistics_for_it(tmp_path: Path, sd: Any) -> None:
    model = sdquant.load_model(sd, quant="nf4,range", progress=False)
    plain = sdquant.load_model(sd, quant="nf4", progress=False)
    packed = [dict(sdquant.nn.quantized(one.unet)) for one in (model, plain)]
    changed = [
        name for name, row in packed[0].items() if not torch.equal(row.parts["absmax"], packed[1][name].parts["absmax"])
    ]
    assert len(changed) > 0.5 * len(packed[0])
    sdquant.save(model, tmp_path / "saved")
    again = dict(sdquant.nn.quantized(sdquant.load_model(tmp_path / "saved", progress=False).unet))
    assert all(torch.equal(again[name].parts["absmax"], packed[0][name].parts["absmax"]) for name in packed[0])

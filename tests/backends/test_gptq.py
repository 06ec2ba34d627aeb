"""GPTQ: codes that make up for each other's errors, in the formats of every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sdquant import backends
from sdquant.backends import _code_levels, _gptq, _new_codes, unexplained, without_effect
from sdquant.core import Packed, QuantSpec, hadamard, registry
from sdquant.utils.metrics import decibels

BLOCKS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs")
MADE = (
    "nf4", "nf4,double_quant", "fp4", "comfy:nvfp4", "w4a4", "svdq-int4,rank=16", "svdq-nvfp4,rank=16", "int4",
    "int4_sym", "qint4", "qint3", "qint2", "sdnq-int6", "sdnq-int4", "sdnq-uint4", "sdnq-uint3", "sdnq-uint4,hadamard",
    "sdnq-uint4,svd,rank=16",
)  # fmt: skip
ROWS, COLUMNS = 64, 512


@dataclass(frozen=True)
class Calibrated(QuantSpec):
    """A spec that knows the second moments of one layer's inputs."""

    moments: Tensor | None = None

    def second_moments(self, inputs: int) -> Tensor | None:
        return None if self.moments is None else self.moments.clone()


def spec_of(scheme: str, moments: Tensor | None) -> Calibrated:
    spec = registry.parse(f"{scheme},gptq")
    return Calibrated(spec.scheme, spec.options, moments=moments)


def normal() -> Tensor:
    """Return a weight, bfloat16 [ROWS, COLUMNS]."""
    return (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return normal()


def correlated(mean: float) -> Tensor:
    """Return correlated inputs, of columns of different sizes: float32 [2048, COLUMNS]."""
    random = torch.Generator().manual_seed(1)
    mixed = torch.randn(COLUMNS, COLUMNS, generator=random) / COLUMNS**0.5 + torch.eye(COLUMNS)
    sizes = torch.rand(COLUMNS, generator=random) * 2
    return (torch.randn(2048, COLUMNS, generator=random) + mean) @ mixed * sizes


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    return correlated(0)


def residual(packed: Packed) -> Packed:
    """Return what the codes of a weight are of: without its rotation and its branch."""
    packed = packed.without_rotation
    branch = packed.spec.scheme.codec.low_rank(packed)
    return packed if branch is None else Packed(spec=packed.spec, parts=branch.residual_of(packed.parts))


@pytest.mark.parametrize("scheme", [*BLOCKS, *MADE])
def test_codes_are_found_again_by_the_values_that_they_stand_for(scheme: str, weight: Tensor) -> None:
    spec = registry.parse(scheme)
    packed = residual(spec.scheme.codec.encode(weight, spec))
    form = spec.scheme.codec.form(packed)
    assert form is not None
    values = spec.scheme.codec.decode(packed, torch.float32)
    levels = _code_levels.levels_of(packed, form)
    step = torch.where(levels.step == 0, torch.ones_like(levels.step), levels.step)
    code, position = _new_codes.Nearest(levels.table)(((values - levels.low) / step).flatten())
    again = _code_levels.with_codes(packed, form, code.view(ROWS, COLUMNS).to(torch.uint8))
    assert torch.equal(spec.scheme.codec.decode(again, torch.float32), values)
    if levels.table.unique().numel() == len(levels.table):  # others have two zeros
        assert torch.equal(again.parts[form.codes], packed.parts[form.codes])
    steps = (levels.low + step * position.view(ROWS, COLUMNS) - values) / step
    assert float(steps.abs().max()) < 0.2  # what decoding in bfloat16 rounds


@pytest.mark.parametrize("scheme", [*BLOCKS, *MADE])
def test_the_output_is_nearer_in_the_same_bytes(scheme: str, weight: Tensor, inputs: Tensor) -> None:
    seen, unseen = inputs[:1536], inputs[1536:]
    moments = (seen.T @ seen / len(seen)).unsqueeze(0)
    spec = spec_of(scheme, moments)
    plain, better = spec.scheme.codec.encode(weight, spec), backends.encode(weight, spec)
    exact = unseen @ weight.float().T

    def snr(packed: Packed) -> float:
        found = unseen @ spec.scheme.codec.decode(packed, torch.float32).T
        return decibels(float(exact.square().mean()), float((found - exact).square().mean()))

    assert snr(better) > snr(plain) + 1
    assert better.spec == plain.spec
    codes = spec.scheme.codec.form(residual(plain))
    assert codes is not None
    for name, part in plain.parts.items():
        assert name == codes.codes or torch.equal(part, better.parts[name])
        assert part.shape == better.parts[name].shape and part.dtype == better.parts[name].dtype


@pytest.mark.parametrize("scheme", [*BLOCKS, *MADE])
def test_a_float32_weight_stays_as_it_is(scheme: str, weight: Tensor, inputs: Tensor) -> None:
    """It is not copied for the search, and may be another layer's too, or be needed again."""
    spec = spec_of(scheme, (inputs.T @ inputs / len(inputs)).unsqueeze(0))
    given = weight.float()
    first = backends.encode(given, spec)
    assert torch.equal(given, weight.float())
    for name, part in backends.encode(given, spec).parts.items():
        assert torch.equal(part.view(torch.uint8), first.parts[name].view(torch.uint8))


@pytest.mark.parametrize("scheme", ["int4", "q3_k", "sdnq-uint4,hadamard"])
def test_what_it_leaves_of_noise_is_foretold(scheme: str, weight: Tensor, inputs: Tensor) -> None:
    """By the errors of plain codes, for a plan."""
    moments = inputs.T @ inputs / len(inputs)
    spec = spec_of(scheme, moments.unsqueeze(0))
    plain, better = spec.scheme.codec.encode(weight, spec), backends.encode(weight, spec)
    errors, left = (spec.scheme.codec.decode(one, torch.float32) - weight.float() for one in (plain, better))
    rotation = plain.spec.rotation
    errors = hadamard.rotate_by_matrix(errors, rotation) if rotation else errors
    foretold = float((errors.square() @ unexplained(moments.unsqueeze(0), COLUMNS, rotation)).sum())
    assert 0.8 < foretold / float((left @ moments * left).sum()) < 1.25


@pytest.mark.parametrize("loud", [1, 3000])
def test_what_is_unexplained_is_the_same_in_single_precision(loud: int, inputs: Tensor) -> None:
    scaled = inputs.clone()
    scaled[:, :5] *= loud
    moments = scaled.T @ scaled / len(scaled)
    exact = moments.double()
    exact.diagonal().add_(0.01 * exact.diagonal().mean())
    order = moments.diagonal().argsort(descending=True, stable=True)  # H^-1 = U^T U, and 1 / U_ii^2 is what is left
    inverse = torch.linalg.cholesky(exact[order][:, order].inverse(), upper=True)
    left = torch.empty(COLUMNS, dtype=torch.float64)
    left[order] = inverse.diagonal().square().reciprocal()
    assert torch.allclose(unexplained(moments.unsqueeze(0), COLUMNS).double(), left, rtol=1e-3, atol=0)


def test_moments_that_single_precision_cannot_factor_are_factored(inputs: Tensor) -> None:
    moments = inputs.T @ inputs / len(inputs)
    moments -= 0.012 * moments.diagonal().mean() * torch.eye(COLUMNS)  # the damping is less than what is negative
    found = unexplained(moments.unsqueeze(0), COLUMNS)
    assert bool((found > 0).all()) and bool(found.isfinite().all())


def test_blocks_of_moments_are_rounded_each_for_itself(weight: Tensor, inputs: Tensor) -> None:
    moments = inputs.T @ inputs / len(inputs)
    blocks = torch.stack([moments[at : at + 128, at : at + 128] for at in range(0, COLUMNS, 128)])
    whole = backends.encode(weight, spec_of("int4", torch.block_diag(*blocks).unsqueeze(0)))
    parts = [
        backends.encode(weight[:, at * 128 : at * 128 + 128], spec_of("int4", blocks[at : at + 1])) for at in range(4)
    ]
    codes = torch.cat([part.parts["codes"] for part in parts], dim=1)
    each = backends.encode(weight, spec_of("int4", blocks)).parts["codes"]
    assert torch.equal(each, codes)
    assert (each != whole.parts["codes"]).float().mean() < 0.01  # the order of columns is another, and sums are


@pytest.mark.parametrize(("block", "joined"), [(32, 128), (96, 384), (128, 128)])
def test_blocks_that_end_within_a_rotated_group_are_joined_as_far_as_it_goes(
    block: int, joined: int, inputs: Tensor
) -> None:
    """Not all of them: a layer of 12288 inputs would take minutes, and gigabytes."""
    moments = inputs.T @ inputs / len(inputs)
    count = -(-COLUMNS // block)
    padded = torch.nn.functional.pad(moments, (0, count * block - COLUMNS) * 2)
    blocks = torch.stack([padded[at : at + block, at : at + block] for at in range(0, count * block, block)])
    turned = _gptq.rotated_moments(blocks.clone(), 128, COLUMNS)
    assert turned.shape == (-(-count * block // joined), joined, joined)
    matrix = hadamard.rotate_by_matrix(torch.eye(COLUMNS), 128)
    whole = torch.block_diag(*blocks)[:COLUMNS, :COLUMNS]
    assert torch.allclose(torch.block_diag(*turned)[:COLUMNS, :COLUMNS], matrix.T @ whole @ matrix, atol=1e-4)


@pytest.mark.parametrize("scheme", ["int4", "sdnq-uint4", "q4_0"])
def test_convolutions(scheme: str, inputs: Tensor) -> None:
    weight = torch.randn(32, 64, 2, 4, generator=torch.Generator().manual_seed(2)).bfloat16()
    moments = (inputs.T @ inputs / len(inputs)).unsqueeze(0)
    spec = spec_of(scheme, moments)
    errors = [
        spec.scheme.codec.decode(packed, torch.float32).sub_(weight.float()).view(32, -1)
        for packed in (spec.scheme.codec.encode(weight, spec), backends.encode(weight, spec))
    ]
    plain, better = (float((error @ moments[0] * error).sum()) for error in errors)
    assert better < 0.8 * plain


def test_inputs_that_are_always_zero(weight: Tensor, inputs: Tensor) -> None:
    """Such columns have no moments at all, as behind a ReLU; and a layer may get no input."""
    moments = inputs.T @ inputs / len(inputs)
    moments[:100] = moments[:, :100] = 0
    packed = backends.encode(weight, spec_of("int4", moments.unsqueeze(0)))
    values = packed.spec.scheme.codec.decode(packed, torch.float32)
    assert float((values - weight.float()).abs().max()) < 0.05
    plain = backends.encode(weight, spec_of("int4", None))
    none = backends.encode(weight, spec_of("int4", torch.zeros(1, COLUMNS, COLUMNS)))
    assert (none.parts["codes"] != plain.parts["codes"]).float().mean() < 0.01  # the scale is rounded to float16


def test_codes_that_are_worse_are_not_kept(weight: Tensor, inputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = _gptq.with_new_codes

    def of_other_rows(packed: Packed, *more: Any) -> Packed:
        parts = rounded(packed, *more).parts
        return Packed(spec=packed.spec, parts={**parts, "codes": parts["codes"].roll(1, 0)})

    monkeypatch.setattr(_gptq, "with_new_codes", of_other_rows)
    spec = spec_of("int4", (inputs.T @ inputs / len(inputs)).unsqueeze(0))
    plain = spec.scheme.codec.encode(weight, spec)
    assert torch.equal(backends.encode(weight, spec).parts["codes"], plain.parts["codes"])


@pytest.mark.parametrize("scheme", ["q4_k", "int4", "nf4", "sdnq-uint3", "qint3", "comfy:nvfp4", "svdq-int4,rank=16"])
def test_rows_do_not_know_of_each_other(
    scheme: str, weight: Tensor, inputs: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(scheme, (inputs.T @ inputs / len(inputs)).unsqueeze(0))
    at_once = backends.encode(weight, spec).parts
    monkeypatch.setattr(_new_codes, "WEIGHTS_AT_ONCE", 7 * COLUMNS)
    some_by_some = backends.encode(weight, spec).parts
    assert at_once.keys() == some_by_some.keys()
    for name, part in at_once.items():  # products of fewer rows may be summed up in another order
        changed = some_by_some[name].view(torch.uint8) != part.view(torch.uint8)
        assert float(changed.float().mean()) < 0.01, name


@pytest.mark.parametrize("scheme", ["q4_k", "q2_k", "iq2_xxs"])
@pytest.mark.parametrize("squares", ["zero", "partly zero", "huge"])
def test_weighed_by_inputs_of_any_size(scheme: str, squares: str, weight: Tensor) -> None:
    """What no input of calibration needed keeps its value, and ggml's sums do not overflow."""
    diagonal = torch.linspace(0.5, 1, COLUMNS) * {"zero": 0.0, "partly zero": 1.0, "huge": 1e36}[squares]
    diagonal[: COLUMNS // 2] *= 0 if squares == "partly zero" else 1
    row = registry.scheme(scheme)
    spec = Calibrated(row, (("imatrix", True),), moments=diagonal.view(COLUMNS, 1, 1))
    errors = [
        float((row.codec.decode(row.codec.encode(weight, one), torch.float32) - weight.float()).square().mean())
        for one in (QuantSpec(row), spec)
    ]
    assert errors[1] < 1.3 * errors[0]


@pytest.mark.parametrize(
    ("scheme", "shape", "options"),
    [
        ("comfy:nvfp4,gptq", (64, 40), ["gptq"]), ("comfy:nvfp4,gptq", (64, 64), []),
        ("sdnq-uint4,svd,rank=16,gptq", (64, 64, 1, 1), ["gptq"]), ("sdnq-uint4,svd,rank=16,gptq", (64, 64), []),
        ("sdnq-uint4,gptq", (64, 64, 1, 1), []), ("nf4,gptq", (64, 40), []),
        ("q4_0,gptq", (64, 40), []), ("q4_0,imatrix", (64, 40), ["imatrix"]), ("q4_0,imatrix", (64, 64), []),
        ("q4_k,imatrix", (64, 64), ["imatrix"]), ("q4_k,gptq", (64, 64), []),
    ],
)  # fmt: skip
def test_where_the_options_change_nothing(scheme: str, shape: tuple[int, ...], options: list[str]) -> None:
    """What is said of them is what the encoders do."""
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=random)
    mixed = torch.randn(shape[1], shape[1], generator=random)
    moments = mixed @ mixed.T / shape[1] + torch.diag(torch.rand(shape[1], generator=random) * 20)
    spec = registry.parse(scheme)
    assert [name for name, _ in without_effect(spec, shape)] == options
    with_option = Calibrated(spec.scheme, spec.options, moments=moments.unsqueeze(0))
    without = QuantSpec(spec.scheme, tuple(one for one in spec.options if one[0] not in ("gptq", "imatrix")))
    one, other = (backends.encode(weight, each).parts for each in (with_option, without))
    same = all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)
    assert same == bool(options)

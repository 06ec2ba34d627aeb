"""Activations rounded by the C kernels: the bits of the same in torch."""

from __future__ import annotations

import logging

import pytest
import torch

from sdquant.kernels.cpu import int8
from sdquant.rules import QuantizationRule
from sdquant.rules.core import fast_activations
from sdquant.rules.core.numerics import from_codes
from sdquant.rules.core.qarray import dequantize, quantize
from sdquant.rules.core.qtypes import qtype
from sdquant.rules.packed_layout import act_how

if int8.sizes(64) is None:
    pytest.skip("there are no such kernels here", allow_module_level=True)

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
TYPES = ("int8", "int4", "int2", "float8_e4m3fn", "float8_e5m2")


def inputs(*shape: int) -> torch.Tensor:
    """Numbers of all sizes, rows of zeros and of tiny ones, and what is no number."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x.view(-1)[::5] *= 1e-3
    x.view(-1)[::7] *= 1e-5
    if shape[0] > 4:
        x[1], x[2, 3], x[3, 4] = 0, torch.nan, torch.inf
        x[4] *= 1e-30
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("tile", [None, 16, 64])
def test_the_bits_are_those_of_torch(tile: int | None, name: str, dtype: torch.dtype) -> None:
    rule = QuantizationRule(weight_qtype="int8", act_qtype=name, tile_size=tile)
    for shape in ((7, 128), (2, 3, 192), (1, 64)):
        x = inputs(*shape).to(dtype)
        wanted = quantize(x, act_how(rule, x.ndim, conv=False))
        decoded = fast_activations.numbers(x, rule, decoded=True)
        assert decoded is not None
        torch.testing.assert_close(decoded[0].to(dtype), dequantize(wanted), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(decoded[1], wanted.scale, rtol=0, atol=0, equal_nan=True)
        codes = fast_activations.numbers(x, rule, decoded=False)
        if tile is None or tile == shape[-1]:
            assert codes is not None
            units = from_codes(wanted.qvalue, qtype(name), wanted.scale.dtype)
            torch.testing.assert_close(codes[0], units, rtol=0, atol=0, equal_nan=True)
        else:
            assert codes is None  # products of tiles are not floats'


def test_every_number_of_the_float_types() -> None:
    """All that lie between two of them, and next to where the step changes."""
    for name in TYPES[3:]:
        codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float()
        levels = codes[codes.isfinite()].unique()
        middles = (levels[1:] + levels[:-1]) / 2
        around = [levels, middles, middles * (1 + 1e-6), middles * (1 - 1e-6)]
        x = torch.cat([*around, levels.max()[None]])[None]
        rule = QuantizationRule(weight_qtype="int8", act_qtype=name)
        found = fast_activations.numbers(x, rule, decoded=False)
        wanted = quantize(x, act_how(rule, 2, conv=False))
        assert found is not None
        assert torch.equal(found[0], wanted.qvalue.float()) and torch.equal(found[1], wanted.scale)


def test_what_is_left_to_torch() -> None:
    x = torch.randn(3, 64)
    for more in (
        {"act_qtype": "int16"}, {"act_qtype": "nf4"}, {"act_qtype": "mxfp8", "tile_size": 32},
        {"act_qtype": "int8", "act_calibration_method": "minmax"},
        {"act_qtype": "int8", "act_calibration_method": "absmax,0.9"},
        {"act_qtype": "int8", "act_static_scale": True},
    ):  # fmt: skip
        assert fast_activations.numbers(x, QuantizationRule(weight_qtype="int8", **more), decoded=True) is None
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
    assert fast_activations.numbers(x.double(), rule, decoded=True) is None
    assert fast_activations.numbers(x[:0], rule, decoded=True) is None


def test_a_kernel_that_rounds_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fast_activations._right.cache_clear()
    real = int8.numbers_of
    monkeypatch.setattr(int8, "numbers_of", lambda *args: (real(*args)[0] * 1.01, real(*args)[1]))
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
    with caplog.at_level(logging.WARNING):
        assert fast_activations.numbers(torch.randn(3, 64), rule, decoded=True) is None
    assert "do not round activations to int8 as torch does" in caplog.text
    fast_activations._right.cache_clear()

"""Layers that quantize their own activations: the C kernels give the bits of the rules' arithmetic in torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdquant.core.backend import Geometry
from sdquant.kernels import scheme_activations
from sdquant.kernels.cpu import int8
from sdquant.kernels.cpu.cpu_kernels import Native
from sdquant.nn import QuantizedLayer
from sdquant.rules import PtqProvider, QuantizationRule

from .instructions import others, use

if int8.sizes(64) is None:
    pytest.skip("there are no kernels for products in integers here", allow_module_level=True)

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
RULES: dict[str, dict[str, Any]] = {
    "w8a8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "w8a4": {"weight_qtype": "int8", "act_qtype": "int4"},
    "w4a8": {"weight_qtype": "int4", "act_qtype": "int8"},
    "w3a6": {"weight_qtype": "int3", "act_qtype": "int6"},
    "w2a8": {"weight_qtype": "int2", "act_qtype": "int8"},
    "w7a8": {"weight_qtype": "int7", "act_qtype": "int8"},
    "zero points": {"weight_qtype": "int8", "act_qtype": "int8", "weight_calibration_method": "minmax"},
}
# Whole panels and tiles, parts of them, fewer columns than a line, columns that a row of codes is filled up for.
SHAPES = ((192, 256), (33, 128), (5, 24), (64, 4096), (40, 1000))


# Those of avx512vnni take from avx2's what is not of integers.
@pytest.fixture(autouse=True, params=["", *others("avx512bf16", "avx512vnni", "avx2")])
def by(request: pytest.FixtureRequest) -> Iterator[None]:
    assert use(request.param)
    yield
    use("")


def layer_of(rule: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype, bias: bool = True) -> Any:
    torch.manual_seed(0)
    module = nn.Linear(shape[1], shape[0], bias=bias).to(dtype)
    made = PtqProvider([]).layer(module, QuantizationRule(**rule), "a")
    assert isinstance(made, QuantizedLayer)
    return made


def by_torch(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer._backend.linear(layer.packed, x)
    return y if layer.bias is None else y + layer.bias


def inputs(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of all kinds: ordinary ones, zeros, sparse, huge, tiny, and those with what is no number."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    x[0] *= torch.arange(columns) % 3 == 0
    x[-1] *= 37
    if rows > 6:
        x[1], x[2, 1], x[3, 2] = 0, torch.nan, torch.inf
        x[4] *= 1e-30
        x[5] *= 1e-3
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_the_bits_are_those_of_torch(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for of_weight, bias in ((dtype, True), (torch.bfloat16, False)):
        layer = layer_of(RULES[name], shape, of_weight, bias)
        for rows in (1, 2, 13, 100, 700):
            x = inputs(rows, shape[1], dtype)
            with torch.no_grad():
                found, wanted = layer(x), by_torch(layer, x)
            assert isinstance(layer._prepared, scheme_activations.Codes)
            assert found.dtype == dtype
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", ["int8", "int4"])
def test_tiles(weight: str, dtype: torch.dtype) -> None:
    for tile, columns in ((128, 384), (192, 384), (0.5, 256), (384, 384), (320, 960)):
        rule = {"weight_qtype": weight, "act_qtype": "int8", "tile_size": tile}
        layer = layer_of(rule, (70, columns), dtype)
        for rows in (1, 13, 100, 700):
            x = inputs(rows, columns, dtype)
            with torch.no_grad():
                found, wanted = layer(x), by_torch(layer, x)
            assert isinstance(layer._prepared, scheme_activations.Codes)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Conv2d], tuple[int, int]]] = {
    "3x3": (lambda: nn.Conv2d(64, 80, 3, padding=1), (9, 17)),
    "1x1": (lambda: nn.Conv2d(40, 33, 1), (5, 5)),
    "strided": (lambda: nn.Conv2d(8, 7, 3, stride=2, padding=1, bias=False), (16, 16)),
    "dilated": (lambda: nn.Conv2d(32, 64, 5, padding=2, dilation=2), (12, 11)),
    "uneven": (lambda: nn.Conv2d(24, 33, (3, 1), stride=(2, 1), padding=(1, 0)), (8, 8)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions(kind: str, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, places = CONVOLUTIONS[kind]
    module = make().to(dtype)
    layer: Any = PtqProvider([]).layer(module, QuantizationRule(**RULES[name]), "a")
    how = Geometry(stride=module.stride, padding=module.padding, dilation=module.dilation, groups=1)  # type: ignore[arg-type]
    for batch, order in ((1, torch.contiguous_format), (3, torch.contiguous_format), (2, torch.channels_last)):
        x = torch.randn(batch, module.in_channels, *places)
        if batch > 2:
            x[1], x[2] = 0, x[2] * 1e-3
            x[2, 3, 1, 1] = torch.nan
        x = x.to(dtype).to(memory_format=order)
        with torch.no_grad():
            found = layer(x)
            wanted = layer._backend.convolve(layer.packed, x, how)
            wanted = wanted if layer.bias is None else wanted + layer.bias.view(-1, 1, 1)
            direct = scheme_activations.convolve(
                layer._backend, layer.packed, layer._form, layer._activations, x, layer.bias, how
            )
        assert direct is not None and found.is_contiguous(memory_format=order)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_that_was_found_beforehand(dtype: torch.dtype) -> None:
    layer = layer_of(RULES["w8a8"], (64, 128), dtype)
    packed = layer.packed
    parts = {**packed.parts, "act_scale": torch.tensor([0.0123])}
    details = {**packed.spec.details, "act_static_scale": True, "act_shape": [1]}
    static = type(packed)(spec=type(packed.spec)(**{**vars(packed.spec), "details": details}), parts=parts)
    layer._hold(static)
    x = inputs(70, 128, dtype)
    with torch.no_grad():
        found, wanted = layer(x), by_torch(layer, x)
    assert isinstance(layer._prepared, scheme_activations.Codes)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "rule",
    [
        {"weight_qtype": "int8", "act_qtype": "float8_e4m3fn"},
        {"weight_qtype": "nf4", "act_qtype": "int8"},
        {"weight_qtype": "int8", "act_qtype": "int8", "act_calibration_method": "minmax"},
        {"weight_qtype": "int8", "act_qtype": "int8", "act_calibration_method": "absmax,0.9"},
        {"weight_qtype": "int8", "act_qtype": "int16"},
        {"weight_qtype": "int8", "act_qtype": "int8", "tile_size": 64},
    ],
    ids=str,
)
def test_other_rules_are_left_to_torch(rule: dict[str, Any]) -> None:
    layer = layer_of(rule, (32, 128), torch.bfloat16)
    x = inputs(20, 128, torch.bfloat16)
    with torch.no_grad():
        found = layer(x)
        assert layer._prepared is None
        wanted = by_torch(layer, x)
        if Native().unrounded(layer._form, layer.packed.parts, x.dtype) and "tile_size" in rule:
            # Tiles are a product of floats, whose weights are not rounded there.
            lost = 2.0**-7 * (x.abs().float() @ layer.dequantize().abs().float().T + wanted.abs().float())
            assert bool(((found - wanted).abs() <= lost)[wanted.isfinite()].all())
            assert torch.equal(found.isfinite(), wanted.isfinite())
        else:
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_gradients_and_odd_inputs() -> None:
    layer = layer_of(RULES["w8a8"], (32, 64), torch.float32)
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        wanted = layer(x)
    own = x.clone().requires_grad_()
    found = layer(own)
    assert torch.equal(found, wanted)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    torch.testing.assert_close(own.grad, layer.dequantize(torch.float32).sum(0).expand(2, 3, 64))
    with torch.no_grad():
        assert torch.equal(layer(x.transpose(0, 1)), wanted.transpose(0, 1))
        assert layer(x[:0]).shape == (0, 3, 32)
        assert torch.equal(layer(x[0, 0]), wanted[0, 0])


def test_a_kernel_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheme_activations, "_verdicts", {})
    real = int8.codes_of
    monkeypatch.setattr(int8, "codes_of", lambda *args: (lambda codes, scale: (codes, scale * 1.01))(*real(*args)))
    layer, x = layer_of(RULES["w8a8"], (32, 64), torch.float32), torch.randn(20, 64)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        found = layer(x)
    assert layer._prepared is None and torch.equal(found, by_torch(layer, x))
    assert "their results are wrong" in caplog.text


FLOATS: dict[str, dict[str, Any]] = {
    "float8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
    "float8 and int8": {"weight_qtype": "float8_e5m2", "act_qtype": "int8"},
    "nf4": {"weight_qtype": "nf4", "act_qtype": "int8"},
    "small tiles": {"weight_qtype": "int8", "act_qtype": "int8", "tile_size": 16},
    "tiles": {"weight_qtype": "int4", "act_qtype": "int8", "tile_size": 128},  # of a convolution
    "mxfp8": {"weight_qtype": "mxfp8", "act_qtype": "mxfp8", "tile_size": 32},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "name"),
    [("linear", name) for name in FLOATS] + [("convolution", name) for name in FLOATS if name != "mxfp8"],  # no tiles
)
def test_products_of_floats(kind: str, name: str, dtype: torch.dtype) -> None:
    """As the rules have them in torch, but for the order of the sums."""
    torch.manual_seed(0)
    floats: nn.Module = nn.Linear(256, 48) if kind == "linear" else nn.Conv2d(256, 48, 3, padding=1)
    layer: Any = PtqProvider([]).layer(floats.to(dtype), QuantizationRule(**FLOATS[name]), "a")
    x = torch.randn(*((2, 9, 256) if kind == "linear" else (2, 256, 5, 6))).to(dtype)
    how = None if kind == "linear" else Geometry(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
    with torch.no_grad():
        found = scheme_activations.as_floats(layer._backend, layer.packed, layer._form, x, geometry=how)
        if (kind, name) == ("linear", "tiles"):
            assert found is None  # in integers
            return
        wanted = (
            layer._backend.linear(layer.packed, x) if how is None else layer._backend.convolve(layer.packed, x, how)
        )
        assert found is not None and found.dtype == wanted.dtype
        noise = (found.double() - wanted.double()).square().sum() / wanted.double().square().sum()
        assert noise < {torch.float32: 1e-11, torch.float16: 1e-6, torch.bfloat16: 2e-5}[dtype]
        after = layer.bias if how is None else layer.bias.view(-1, 1, 1)
        assert torch.equal(layer(x), found + after)

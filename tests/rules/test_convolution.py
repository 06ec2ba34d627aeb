"""Convolutions of quantized tensors against sums of whole numbers in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sdquant.errors import SettingsError
from sdquant.kernels import int_matmul
from sdquant.rules.core import conv_general
from sdquant.rules.core.conv_general import CONVOLUTIONS, convolve
from sdquant.rules.core.qarray import HowToQuantize, QArray, dequantize, quantize

from . import reference, reference_qt

CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"padding": 2, "stride": 2}),
    (2, {"padding": 1}),
    (2, {"padding": (0, 2), "stride": (2, 1), "dilation": (1, 2)}),
    (2, {"padding": "same", "dilation": 2}),
    (2, {"padding": 1, "groups": 2}),
    (3, {"padding": "valid"}),
]


def operands(space: int, groups: int, dtype: str) -> tuple[reference.Array, reference.Array]:
    random = np.random.default_rng(11)
    rounded = reference.ROUNDINGS[dtype]
    shapes = (2, 4, *(6, 7, 5)[:space]), (6, 4 // groups, *(3, 3, 2)[:space])
    x, w = (rounded(random.normal(size=shape).astype(np.float32) + 0.2) for shape in shapes)
    return x, w


def ours(x: reference.Array, dtype: str, qtype: str, method: str = "absmax") -> QArray:
    how = HowToQuantize(qtype=qtype, channelwise_axes=(0,), calibration_method=method)
    return quantize(torch.from_numpy(x).to(getattr(torch, dtype)), how)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("act", ["int8", "int4"])
@pytest.mark.parametrize(("space", "arguments"), CASES, ids=str)
def test_sums_of_integers_are_exact(
    space: int, arguments: dict[str, Any], act: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = operands(space, arguments.get("groups", 1), dtype)
    rounded = reference.ROUNDINGS[dtype]
    codes, scales = [], []
    for one, qtype in ((x, act), (w, "int4")):
        values, scale, _, _ = reference.quantize(one.reshape(len(one), -1), qtype, one[0].size, dtype)
        codes.append(values.reshape(one.shape).astype(np.int64))
        scales.append(scale.reshape(-1))
    sums = rounded(reference_qt.products(*codes, arguments).astype(np.float32))
    rest = [1] * space
    wanted = rounded(rounded(sums * scales[0].reshape(-1, 1, *rest)) * scales[1].reshape(1, -1, *rest))
    made = convolve(ours(x, dtype, act), ours(w, dtype, "int4"), **arguments)
    assert made.dtype == getattr(torch, dtype) and np.array_equal(made.float().numpy(), wanted)
    monkeypatch.setattr(conv_general, "PIECE", 100)  # laid out in many pieces
    assert torch.equal(convolve(ours(x, dtype, act), ours(w, dtype, "int4"), **arguments), made)


@pytest.mark.parametrize("side", ["x", "weight"])
@pytest.mark.parametrize(("space", "arguments"), CASES, ids=str)
def test_a_zero_point_on_one_side(space: int, arguments: dict[str, Any], side: str) -> None:
    x, w = operands(space, arguments.get("groups", 1), "float32")
    methods = {"x": "absmax", "weight": "absmax", side: "minmax"}
    left, right = ours(x, "float32", "int8", methods["x"]), ours(w, "float32", "int8", methods["weight"])
    keywords = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | arguments
    exact = CONVOLUTIONS[space](dequantize(left).double(), dequantize(right).double(), None, **keywords)
    assert (left.zero_point is None) == (side == "weight")
    assert (convolve(left, right, **keywords) - exact).abs().max() < 1e-5
    with pytest.raises(SettingsError, match="both"):
        convolve(ours(x, "float32", "int8", "minmax"), ours(w, "float32", "int8", "minmax"), **keywords)


@pytest.mark.parametrize("name", ["nf4", "int4", "float8_e4m3fn"])
def test_weights_alone(name: str) -> None:
    x, w = operands(2, 1, "float32")
    packed = ours(w, "float32", name)
    wanted = torch.nn.functional.conv2d(torch.from_numpy(x), dequantize(packed), padding=1)
    assert torch.equal(convolve(torch.from_numpy(x), packed, padding=1), wanted)


def test_float8() -> None:
    x, w = operands(2, 1, "float32")
    left, right = ours(x, "float32", "float8_e4m3fn"), ours(w, "float32", "float8_e4m3fn")
    exact = CONVOLUTIONS[2](dequantize(left).double(), dequantize(right).double(), None, 1, 1)
    assert (convolve(left, right, padding=1) - exact).abs().max() < 1e-4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (convolve(left, right, padding=1) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize(("rows", "columns", "size"), [(0, 3, 4), (1, 1, 1), (1, 7, 515), (17, 5, 130), (64, 33, 1024)])
def test_products_of_codes_are_exact_at_the_ends_of_their_range(rows: int, columns: int, size: int, dtype: str) -> None:
    random = np.random.default_rng(rows)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    left, right = (random.choice([low, low, low, high, 1], size=(n, size)) for n in (rows, columns))
    made = int_matmul.product(*(torch.from_numpy(one.astype(dtype)) for one in (left, right)))
    assert np.array_equal(made.numpy(), left.astype(np.int64) @ right.astype(np.int64).T)


def test_a_cpu_whose_kernel_saturates_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without VNNI, where pairs of products are added in 16 bits."""
    kernel = torch._int_mm

    def saturating(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return kernel(left, right).clamp(-32768, 32767)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    int_matmul._good_on_cpu.cache_clear()
    ones = torch.full((2, 64), 127, dtype=torch.int8)
    try:
        assert int_matmul.product(ones, ones).tolist() == [[64 * 127 * 127] * 2] * 2
    finally:
        int_matmul._good_on_cpu.cache_clear()

"""Codes, scales and products, bit for bit what the formulas give when they are computed in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdquant.core.code_tables import NF4
from sdquant.errors import SettingsError
from sdquant.rules.core.dot_general import linear
from sdquant.rules.core.numerics import PART, from_codes, to_codes
from sdquant.rules.core.qarray import HowToQuantize, QArray, dequantize, quantize, quantize_with, range_of, scale_shape
from sdquant.rules.core.qtypes import QTYPES, qtype

from . import reference

ROWS, SIZE = 6, 128
DTYPES = ("float32", "bfloat16")


def numbers(kind: str) -> reference.Array:
    """Test data [ROWS, SIZE]: ordinary weights, numbers that lie on the borders of buckets, hard cases."""
    random = np.random.default_rng(7)
    made = {
        "normal": random.normal(size=(ROWS, SIZE)),
        "ties": random.integers(-255, 256, size=(ROWS, SIZE)) / 2.0,
        "edges": random.normal(size=(ROWS, SIZE)) * 10.0 ** random.integers(-30, 8, size=(ROWS, 1)),
    }[kind].astype(np.float32)
    if kind == "edges":
        made[0], made[1, 1:] = 0, 0
    return made


def ours(x: reference.Array, dtype: str, how: HowToQuantize) -> QArray:
    return quantize(torch.from_numpy(x.copy()).to(getattr(torch, dtype)), how)


def values(array: QArray) -> reference.Array:
    made: reference.Array = from_codes(array.qvalue, qtype(array.qtype), torch.float32).numpy()
    return made


@pytest.mark.parametrize("tile", [None, 16, 32])
@pytest.mark.parametrize("kind", ["normal", "ties", "edges"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [row.name for row in QTYPES])
def test_quantized_as_the_formulas_say(name: str, dtype: str, kind: str, tile: int | None) -> None:
    row = qtype(name)
    if row.tile is not None and row.tile != tile:
        with pytest.raises(SettingsError, match="one scale for every"):
            HowToQuantize(qtype=name, channelwise_axes=(0,), tiled_axes={1: tile} if tile else {})
        return
    x = reference.ROUNDINGS[dtype](numbers(kind))
    how = HowToQuantize(qtype=name, channelwise_axes=(0,), tiled_axes={1: tile} if tile else {})
    made = ours(x, dtype, how)
    wanted, scales, _, back = reference.quantize(x, name, tile or SIZE, dtype)
    assert np.array_equal(made.scale.float().numpy(), scales)
    assert np.array_equal(values(made), wanted)
    assert np.array_equal(dequantize(made).float().numpy(), back)


@pytest.mark.parametrize("method", ["minmax", "absmax,0.8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_other_methods(name: str, dtype: str, method: str) -> None:
    x = reference.ROUNDINGS[dtype](numbers("normal") + 0.5)
    made = ours(x, dtype, HowToQuantize(qtype=name, channelwise_axes=(0,), calibration_method=method))
    wanted, scales, zeros, back = reference.quantize(x, name, SIZE, dtype, method)
    assert np.array_equal(made.scale.float().numpy(), scales) and np.array_equal(values(made), wanted)
    assert (made.zero_point is None) == (zeros is None)
    if made.zero_point is not None:
        assert np.array_equal(made.zero_point.float().numpy(), zeros)
    assert np.array_equal(dequantize(made).float().numpy(), back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "largest", "ratio", "scales"),
    [
        # absmax over the type's largest number, and the power of two that newest Qwix and its release 0.1.8 take for it
        ("mxfp8", 448, 1.0, (1.0, 1.0)), ("mxfp8", 448, 1.0234375, (1.0, 2.0)),
        ("mxfp8", 448, 1.0390625, (2.0, 2.0)), ("mxfp8", 448, 1.984375, (2.0, 2.0)), ("mxfp8", 448, 0.51, (0.5, 1.0)),
        ("mxfp4", 6, 1.15625, (1.0, 2.0)), ("mxfp4", 6, 1.171875, (2.0, 2.0)), ("mxfp4", 6, 0.0, (1.0, 1.0)),
    ],
)  # fmt: skip
def test_powers_of_two_are_outlier_aware(
    name: str, largest: float, ratio: float, scales: tuple[float, float], dtype: torch.dtype
) -> None:
    x = torch.zeros(1, 32, dtype=dtype)
    x[0, 3] = -largest * ratio
    made = quantize(x, HowToQuantize(qtype=name, channelwise_axes=(0,), tiled_axes={1: 32}))
    old = quantize(x, HowToQuantize(qtype=f"{name}_ceil", channelwise_axes=(0,), tiled_axes={1: 32}))
    assert (made.scale.item(), old.scale.item()) == scales
    assert dequantize(made)[0, 3].item() >= -largest * scales[0]  # saturated, where the range is wider


def test_fixed_ranges_are_of_the_whole_tensor() -> None:
    x = torch.from_numpy(numbers("normal"))
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,), calibration_method="fixed,-2,2")
    assert quantize(x, how).scale.tolist() == [[np.float32(2) / np.float32(127.5)]]
    uneven = quantize(x, HowToQuantize(qtype="int8", calibration_method="fixed,-1,3"))
    assert uneven.zero_point is not None and uneven.zero_point.tolist() == [[-64]]
    assert dequantize(uneven).abs().max() <= 3.02


def test_rms() -> None:
    x = torch.from_numpy(numbers("normal"))
    found = range_of(x, HowToQuantize(qtype="int8", channelwise_axes=(0,), calibration_method="rms,3"))["absmax"]
    assert torch.allclose(found[:, 0], 3 * (x.double() ** 2).mean(1).sqrt().float(), rtol=1e-6)


def test_float16_is_not_taken_for_zero() -> None:
    """Weights as Stable Diffusion has them: in float16 itself their scales would fall under the threshold."""
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 0.05).half()
    made = quantize(x, HowToQuantize(qtype="int8", channelwise_axes=(0,)))
    assert made.dtype == torch.float16 and dequantize(made).dtype == torch.float16
    assert (dequantize(made).float() - x.float()).abs().max() < 0.6 * made.scale.max()


def test_tiles_as_shares() -> None:
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,), tiled_axes={1: 0.25})
    assert scale_shape((ROWS, SIZE), how) == (ROWS, 4)
    assert scale_shape((ROWS, SIZE), HowToQuantize(qtype="int8", tiled_axes={1: 1})) == (1, SIZE)
    assert scale_shape((ROWS, SIZE), HowToQuantize(qtype="int8", tiled_axes={1: 1.0})) == (1, 1)
    with pytest.raises(SettingsError, match="not a multiple"):
        scale_shape((ROWS, SIZE), HowToQuantize(qtype="int8", tiled_axes={1: 48}))


@pytest.mark.parametrize("tile", [None, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_integers_are_exact_sums(dtype: str, tile: int | None) -> None:
    random = np.random.default_rng(3)
    rounded = reference.ROUNDINGS[dtype]
    x, w = (rounded(random.normal(size=shape).astype(np.float32)) for shape in ((5, 512), (7, 512)))
    tiles = {1: tile} if tile else {}
    left, right = (
        ours(one, dtype, HowToQuantize(qtype="int8", channelwise_axes=(0,), tiled_axes=tiles)) for one in (x, w)
    )
    done = linear(left, right)
    step = tile or 512
    partial = []
    for start in range(0, 512, step):
        codes = [values(one)[:, start : start + step].astype(np.int64) for one in (left, right)]
        scales = [one.scale.float().numpy()[:, start // step] for one in (left, right)]
        sums = rounded((codes[0] @ codes[1].T).astype(np.float32))
        partial.append(rounded(rounded(sums * scales[0][:, None]) * scales[1][None]))
    assert done.dtype == getattr(torch, dtype)
    wanted = torch.stack([torch.from_numpy(part).to(done.dtype) for part in partial], -1).sum(-1)
    assert torch.equal(done, wanted)


@pytest.mark.parametrize("side", ["x", "weight"])
def test_a_zero_point_on_one_side(side: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x, w = torch.randn(2, 3, 64, generator=generator) + 0.3, torch.randn(9, 64, generator=generator) - 0.2
    methods = {"x": "absmax", "weight": "absmax", side: "minmax"}
    left = quantize(x, HowToQuantize(qtype="int8", channelwise_axes=(0, 1), calibration_method=methods["x"]))
    right = quantize(w, HowToQuantize(qtype="int8", channelwise_axes=(0,), calibration_method=methods["weight"]))
    exact = dequantize(left).double() @ dequantize(right).double().T
    assert (linear(left, right) - exact).abs().max() < 1e-5
    both = quantize(w, HowToQuantize(qtype="int8", channelwise_axes=(0,), calibration_method="minmax"))
    lopsided = quantize(x, HowToQuantize(qtype="int8", channelwise_axes=(0, 1), calibration_method="minmax"))
    with pytest.raises(SettingsError, match="both"):
        linear(lopsided, both)


@pytest.mark.parametrize("shape", [(1, 3, 1), (2, 1, 1), (1, 1, 1), (2, 3, 1)])
def test_scales_that_some_rows_share(shape: tuple[int, ...]) -> None:
    """As static ranges have them, averaged over some axes."""
    generator = torch.Generator().manual_seed(9)
    x, w = torch.randn(2, 3, 64, generator=generator), torch.randn(9, 64, generator=generator)
    left = quantize_with(x, "int8", torch.rand(shape, generator=generator) + 0.01, None)
    right = quantize(w, HowToQuantize(qtype="int8", channelwise_axes=(0,)))
    exact = dequantize(left).double() @ dequantize(right).double().T
    assert (linear(left, right) - exact).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["nf4", "int4", "float8_e4m3fn"])
def test_weight_only(name: str) -> None:
    generator = torch.Generator().manual_seed(6)
    x, w = torch.randn(4, 64, generator=generator), torch.randn(9, 64, generator=generator)
    packed = quantize(w, HowToQuantize(qtype=name, channelwise_axes=(0,), tiled_axes={1: 32}))
    assert torch.equal(linear(x, packed), x @ dequantize(packed).T)


def test_float8_products() -> None:
    generator = torch.Generator().manual_seed(8)
    x, w = torch.randn(4, 64, generator=generator), torch.randn(9, 64, generator=generator)
    left, right = (quantize(one, HowToQuantize(qtype="float8_e4m3fn", channelwise_axes=(0,))) for one in (x, w))
    exact = dequantize(left).double() @ dequantize(right).double().T
    assert (linear(left, right) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("text", ["absmin", "rms", "fixed", "fixed,1,2", "fixed,3,1", "absmax,a", "minmax,1,2"])
def test_methods_that_cannot_be(text: str) -> None:
    with pytest.raises(SettingsError, match="calibration method"):
        HowToQuantize(qtype="int8", calibration_method=text)


@pytest.mark.parametrize("name", ["int9", "bfloat16", "fp4"])
def test_types_that_do_not_exist(name: str) -> None:
    with pytest.raises(SettingsError, match="the types are"):
        qtype(name)


def test_what_is_no_float_is_refused() -> None:
    with pytest.raises(SettingsError, match="int64"):
        quantize(torch.arange(4), HowToQuantize(qtype="int8"))


def test_levels_are_the_nearest_by_distances_in_float32() -> None:
    """At every border, a step of float32 to either side of it, and for more numbers than are looked at in one part."""
    table = np.array(NF4, np.float32)
    middles = (table[1:] + table[:-1]) / 2
    around = [np.nextafter(middles, np.float32(side)) for side in (-2, 2)]
    some = np.random.default_rng(3).normal(size=PART + 77).astype(np.float32)
    x = np.concatenate([table, middles, *around, some, np.array([np.nan, 9.0, -9.0], np.float32)])
    wanted = np.abs(x[:, None] - table).argmin(1)  # the first of those that are as near
    wanted[np.isnan(x)] = 0
    assert torch.equal(to_codes(torch.from_numpy(x), qtype("nf4")), torch.from_numpy(wanted).to(torch.uint8))

"""Products in float32 for processors without instructions for 16-bit floats, here on any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdquant import backends
from sdquant.kernels import cpu, dispatch, fp32_gemm
from sdquant.nn import quantized_layer

# Planes, nibbles, bytes, blocks that rows are whole of, a packing that the C code has no table for.
SCHEMES = ("nf4", "qint4", "qint8", "qint3", "q8_0", "q4_k", "sdnq-uint4", "fp8")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ISAS = tuple(name for name in ("avx2", "portable") if cpu.extension() and cpu.extension().choose(name))  # type: ignore[union-attr]
if cpu.extension() is not None:
    cpu.extension().choose("")  # type: ignore[union-attr]


@pytest.fixture(autouse=True, params=[*ISAS, "torch"])
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As on a machine where this is the way, in small pieces, with the kernels of an instruction set or none."""
    monkeypatch.setattr(fp32_gemm, "is_profitable", lambda dtype: True)
    monkeypatch.setattr(fp32_gemm, "WEIGHTS", 1 << 12)
    monkeypatch.setattr(fp32_gemm, "FEW", 4)
    monkeypatch.setattr(fp32_gemm, "CONVOLVED", 1 << 13)
    monkeypatch.setattr(fp32_gemm, "ROWS", 7)
    readers = dispatch.readers
    wanted = request.param
    if wanted == "torch":
        monkeypatch.setattr(dispatch, "readers", lambda device: ())
    else:
        cpu.extension().choose(wanted)  # type: ignore[union-attr]
        monkeypatch.setattr(dispatch, "readers", readers)
    monkeypatch.setattr(dispatch, "_ways", {})
    monkeypatch.setattr(dispatch, "_verdicts", {})
    way = dispatch.way
    monkeypatch.setattr(dispatch, "way", lambda *args: dispatch.replace(way(*args), few=0, few_patches=0))
    yield wanted
    if wanted != "torch":
        cpu.extension().choose("")  # type: ignore[union-attr]


def packed_of(scheme: str, weight: Tensor) -> Any:
    spec = backends.parse(scheme)
    return backends.get(spec.scheme.backend).encode(weight, spec)


def unpacked(layer: Any) -> Tensor:
    """The float weight, by the backend."""
    return layer.packed.spec.scheme.codec.decode(layer.packed, layer.compute_dtype)


def close(got: Tensor, exact: Tensor, sizes: Tensor) -> bool:
    """Within sums in float32 and one rounding."""
    allowed = torch.finfo(got.dtype).eps * exact.abs() + 1e-5 * sizes
    return bool(((got.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear(scheme: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 200, dtype=dtype)
    mine = quantized_layer(layer, packed_of(scheme, layer.weight.data))
    weight = unpacked(mine).double()
    x = torch.randn(3, 5, 256).to(dtype)
    exact = F.linear(x.double(), weight, layer.bias.double())
    with torch.no_grad():
        got = mine(x)
    assert got.dtype == dtype and got.shape == exact.shape
    assert close(got, exact, F.linear(x.double().abs(), weight.abs(), layer.bias.double().abs()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("scheme", "groups", "outputs"),
    [("nf4", 1, 96), ("q8_0", 1, 96), ("qint8", 2, 96), ("int8", 4, 40), ("int8", 1, 96)],
)
def test_convolution(scheme: str, groups: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(64, outputs, 3, padding=1, stride=2, groups=groups, dtype=dtype)
    mine = quantized_layer(layer, packed_of(scheme, layer.weight.data))
    weight = unpacked(mine).double()
    x = torch.randn(2, 64, 9, 9).to(dtype)
    run = {"stride": 2, "padding": 1, "groups": groups}
    exact = F.conv2d(x.double(), weight, layer.bias.double(), **run)
    with torch.no_grad():
        got = mine(x)
    assert got.dtype == dtype
    assert close(got, exact, F.conv2d(x.double().abs(), weight.abs(), layer.bias.double().abs(), **run))


def test_for_which_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for those that float32 cannot hold."""
    monkeypatch.undo()
    for name, wanted in (("avx2", True), ("amx", False), ("avx512bf16", False), ("portable", False)):
        monkeypatch.setattr(fp32_gemm, "isa", lambda name=name: name)
        fp32_gemm.is_profitable.cache_clear()
        assert [fp32_gemm.is_profitable(dtype) for dtype in DTYPES] == [wanted] * 3
        assert not fp32_gemm.is_profitable(torch.float64)
    fp32_gemm.is_profitable.cache_clear()


def test_autocast_changes_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 256).bfloat16()
    linear, convolution = nn.Linear(256, 64, dtype=torch.bfloat16), nn.Conv2d(64, 32, 3, dtype=torch.bfloat16)
    for layer, shape in ((linear, (9, 256)), (convolution, (1, 64, 6, 6))):
        mine = quantized_layer(layer, packed_of("nf4", layer.weight.data))
        with torch.no_grad():
            wanted = mine(x.view(shape))
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(mine(x.view(shape)), wanted)


def test_no_rows_and_rows_that_are_no_whole_blocks() -> None:
    layer = nn.Linear(320, 64, bias=False, dtype=torch.bfloat16)  # in blocks of 256
    mine = quantized_layer(layer, packed_of("q4_k", layer.weight.data))
    x = torch.randn(9, 320).bfloat16()
    with torch.no_grad():
        assert mine(x[:0]).shape == (0, 64)
        exact, sizes = (F.linear(f(x.double()), f(unpacked(mine).double())) for f in (lambda t: t, torch.abs))
        assert close(mine(x), exact, sizes)


def test_rows_that_are_wrong_are_noticed(here: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The check at first use: torch decodes then."""
    if here == "torch":
        pytest.skip("no kernels to be wrong")
    (reader, *_) = dispatch.readers("cpu")
    rounded = type(reader).rounded

    def wrong(self: Any, *args: Any) -> bool:
        done = rounded(self, *args)
        args[-1].mul_(1.5)
        return done

    monkeypatch.setattr(type(reader), "rounded", wrong)
    layer = nn.Linear(256, 64, dtype=torch.bfloat16)
    mine = quantized_layer(layer, packed_of("nf4", layer.weight.data))
    x = torch.randn(5, 256).bfloat16()
    with torch.no_grad():
        got = mine(x)
    assert "the rounded weights are wrong" in caplog.text
    exact, sizes = (
        F.linear(f(x.double()), f(unpacked(mine).double()), f(layer.bias.double())) for f in (lambda t: t, torch.abs)
    )
    assert close(got, exact, sizes)

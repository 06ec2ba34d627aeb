"""Products with a weight that is decoded part by part, here on any processor that has the C kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdquant import backends
from sdquant.kernels import blocked_gemm, cpu, dispatch
from sdquant.kernels.cpu.cpu_kernels import Native
from sdquant.nn import quantized_layer

from .test_fp32_gemm import close, packed_of, unpacked

pytestmark = pytest.mark.skipif(cpu.extension() is None, reason="without C kernels a weight is decoded as a whole")

# Planes, nibbles, bytes, blocks that rows are whole of, a packing that the C code has no table for.
SCHEMES = ("nf4", "qint4", "qint8", "qint3", "q8_0", "q4_k", "sdnq-uint4", "fp8")


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """As on a machine where this is the way, in small parts; gives the parts as they are read."""
    seen = []
    original = Native.rows_into

    def rows_into(self: Native, form: Any, parts: Any, start: int, stop: int, out: Tensor) -> bool:
        seen.append((start, stop))
        return original(self, form, parts, start, stop, out)

    way = dispatch.way
    monkeypatch.setattr(dispatch, "way", lambda *args: dispatch.replace(way(*args), few=2, few_patches=2))
    monkeypatch.setattr(blocked_gemm, "most", lambda dtype: 16)
    monkeypatch.setattr(blocked_gemm, "WEIGHTS", 1 << 14)
    monkeypatch.setattr(blocked_gemm, "CONVOLVED", 0)
    monkeypatch.setattr(Native, "rows_into", rows_into)
    return seen


def in_parts(rows: int, columns: int) -> list[tuple[int, int]]:
    return [*blocked_gemm.parts(rows, (1 << 14) * torch.get_num_threads() // columns)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear(scheme: str, dtype: torch.dtype, bias: bool, read: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 200, dtype=dtype, bias=bias)
    mine = quantized_layer(layer, packed_of(scheme, layer.weight.data))
    weight = unpacked(mine).double()
    added = layer.bias.double() if bias else None
    for shape in ((3, 5, 256), (16, 256)):
        x = torch.randn(shape).to(dtype)
        with torch.no_grad():
            mine(x)  # kernels of this kind are held against torch's decoding the first time
            read.clear()
            got = mine(x)
        assert read == in_parts(200, 256)
        exact = F.linear(x.double(), weight, added)
        assert got.dtype == dtype and got.shape == exact.shape
        assert close(got, exact, F.linear(x.double().abs(), weight.abs(), added if added is None else added.abs()))
    read.clear()
    with torch.no_grad():
        mine(torch.randn(17, 256).to(dtype)), mine(torch.randn(2, 256).to(dtype))
    assert not read  # decoded as a whole, and multiplied packed


def test_what_cannot_be_read_in_parts_is_decoded_as_a_whole(read: list[tuple[int, int]]) -> None:
    """Blocks of 256 in rows of 320, as SDXL has them."""
    layer = nn.Linear(320, 64).bfloat16()
    mine = quantized_layer(layer, packed_of("q4_k", layer.weight.data))
    x = torch.randn(8, 320).bfloat16()
    with torch.no_grad():
        assert torch.equal(mine(x), F.linear(x, mine.dequantize(), layer.bias))
    assert read[-1] == in_parts(64, 320)[0]  # it was asked for


@pytest.mark.parametrize("scheme", ["nf4", "qint8", "q8_0", "int8"])
def test_convolutions(scheme: str, read: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(32, 72, 3, padding=1, stride=2).bfloat16()
    mine = quantized_layer(layer, packed_of(scheme, layer.weight.data))
    x = torch.randn(1, 32, 7, 6).bfloat16()  # 12 places
    with torch.no_grad():
        mine(x)
        read.clear()
        got = mine(x)
    assert read == in_parts(72, 288)
    weight = unpacked(mine).double()
    how = {"padding": 1, "stride": 2}
    exact = F.conv2d(x.double(), weight, layer.bias.double(), **how)
    assert close(got, exact, F.conv2d(x.double().abs(), weight.abs(), layer.bias.double().abs(), **how))


def test_kernels_that_decode_parts_wrongly_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = nn.Linear(64, 96).bfloat16()
    packed = packed_of("nf4", layer.weight.data)
    backend = backends.of_scheme("nf4")

    def rows_into(self: Native, form: Any, parts: Any, start: int, stop: int, out: Tensor) -> bool:
        out.zero_()
        return True

    monkeypatch.setattr(Native, "rows_into", rows_into)
    monkeypatch.setattr(dispatch, "_ways", {})
    monkeypatch.setattr(dispatch, "_verdicts", {})
    form = backend.form(packed)
    assert not isinstance(dispatch.way(backend, packed, form, torch.bfloat16).reader, Native)
    assert "some rows decoded alone are wrong" in caplog.text

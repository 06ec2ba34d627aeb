"""Products by the kernels for AVX2, on any machine that has it: numbers of rows and columns at which they change their
way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sdquant import backends
from sdquant.kernels import cpu
from sdquant.kernels.cpu.cpu_kernels import Native

from .reference import multiplied

# Bytes, nibbles in both orders, planes, blocks, groups of one row and of several, scales with shifts and zero points.
SCHEMES = (
    "nf4", "fp4,block_size=4096", "rules,weight_qtype=nf4,tile_size=64", "qint4", "qint8", "bnb-int8", "int8",
    "int4_sym", "int4", "sdnq-uint4", "q8_0", "q4_0", "q4_1", "q5_0", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4", "q2_k",
    "q3_k", "q4_k", "q5_k", "q6_k", "iq3_s", "tq1_0", "qint3", "qint2", "sdnq-uint3", "sdnq-int6", "fp8", "qfloat8",
    "sdnq-fp8", "mxfp8", "comfy:nvfp4", "int4_sym,group_size=32", "sdnq-uint4,group_size=32",
    "rules,weight_qtype=float8_e5m2", "rules,weight_qtype=mxfp4,tile_size=32",
    *(f"rules,weight_qtype=int{bits}" for bits in (2, 3, 5, 6, 7)),
)  # fmt: skip
# Up to 8 rows weights are never in memory; four and three rows are worked on at once, 64 before the next.
ROWS = (1, 2, 3, 4, 5, 8, 9, 11, 64, 65)
FOURS = ("nibbles-low", "nibbles-high", "planes4")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def avx2() -> Iterator[None]:
    extension: Any = cpu.extension()
    if extension is None or not extension.choose("avx2"):
        pytest.skip("no kernels for AVX2 here")
    yield
    extension.choose("")


def close(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Within sums in float32 and one rounding."""
    exact = F.linear(x.double(), weight.double(), bias.double())
    sizes = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    allowed = torch.finfo(got.dtype).eps * exact.abs() + 1e-5 * sizes
    return bool(((got.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", SCHEMES)
def test_rows(text: str, dtype: torch.dtype) -> None:
    """Of 1792 columns, which are worked on in three parts of which the last is shorter, and 50 rows of weights."""
    torch.manual_seed(0)
    weight, bias = torch.randn(50, 1792).to(dtype), torch.randn(50).to(dtype)
    spec = backends.parse(text)
    backend = backends.get(spec.scheme.backend)
    packed = backend.encode(weight, spec)
    form, reader = backend.form(packed), Native()
    assert form is not None and reader.reads(form, packed.parts, dtype)
    sixteen = form.packing in FOURS and form.arithmetic == "float32"
    whole = not form.table or sixteen or form.packing in FLOAT8 or form.table == "e4m3"
    assert reader.unrounded(form, packed.parts, dtype) is (whole and dtype == torch.bfloat16)
    decoded = multiplied(reader, backend, packed, dtype)
    for m in ROWS:
        x = torch.randn(m, 1792).to(dtype)
        out = torch.full((m, 50), torch.nan, dtype=dtype)
        reader.product(form, packed.parts, x, bias, out)
        assert close(out, x, decoded, bias), m


@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-2, 3e3])
@pytest.mark.parametrize("text", ["int8", "int8_sym", "int4", "int4_sym"])
def test_float16_is_rounded_as_ever(text: str, size: float) -> None:
    """Of weights that are no normal numbers of float16, or some are, or whose scales are large."""
    torch.manual_seed(0)
    weight = torch.randn(40, 320) * size
    spec = backends.parse(text)
    backend = backends.get(spec.scheme.backend)
    packed = backend.encode(weight, spec)
    form, decoded = backend.form(packed), backend.decode(packed, torch.float32)
    assert form is not None and form.arithmetic == "float16"
    for m in (1, 8):
        x = torch.randn(m, 320)
        out = torch.full((m, 40), torch.nan)
        Native().product(form, packed.parts, x, None, out)
        assert close(out, x, decoded, torch.zeros(40)), m


@pytest.mark.parametrize("columns", [64, 192, 200, 768, 832, 3072, 6400])
@pytest.mark.parametrize("text", ["qint8", "int4_sym,group_size=-1"])
def test_columns(text: str, columns: int) -> None:
    """With 3072 columns activations of 40 rows do not fit the second cache whole, with 6400 one row not the first."""
    torch.manual_seed(0)
    weight = torch.randn(37, columns).bfloat16()
    spec = backends.parse(text)
    backend = backends.get(spec.scheme.backend)
    packed = backend.encode(weight, spec)
    form = backend.form(packed)
    assert form is not None
    decoded = multiplied(Native(), backend, packed, torch.bfloat16)
    for m in (1, 2, 7, 40):
        x = torch.randn(m, columns).bfloat16()
        out = torch.full((m, 37), torch.nan, dtype=torch.bfloat16)
        Native().product(form, packed.parts, x, None, out)
        assert close(out, x, decoded, torch.zeros(37)), m


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["qfloat8", "mxfp8", "rules,weight_qtype=float8_e5m2", "fp8"])
def test_every_code_of_float8(text: str, dtype: torch.dtype) -> None:
    """By the instruction for float16; NaN, infinity and bitsandbytes' smallest numbers are looked up."""
    spec = backends.parse(text)
    backend = backends.get(spec.scheme.backend)
    packed = backend.encode(torch.randn(12, 512).to(dtype), spec)
    form = backend.form(packed)
    assert form is not None
    codes = packed.parts[form.codes].view(torch.uint8)
    codes.copy_(torch.arange(codes.numel()).view(codes.shape).to(torch.uint8))
    found, exact = torch.empty(12, 512, dtype=dtype), backend.decode(packed, dtype)
    Native().decode_into(form, packed.parts, found)
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.nan_to_num(0.0).view(torch.uint8), exact.nan_to_num(0.0).view(torch.uint8))
    assert (text == "fp8") == bool(exact.isfinite().all())
    for m in (1, 3, 9):
        for first in range(0, 512, m):  # one code alone in each sum
            x = torch.zeros(m, 512, dtype=dtype)
            columns = torch.arange(first, min(first + m, 512))
            x[torch.arange(len(columns)), columns] = 1.0
            out = torch.full((m, 12), 77.0, dtype=dtype)
            clean = exact.isfinite().all(1)
            Native().product(form, packed.parts, x, None, out)
            assert torch.allclose(out[: len(columns), clean], exact[clean][:, columns].T, rtol=1e-2, atol=0), (m, first)
            assert clean.any() or out.isnan().all()


def test_scales_that_are_no_numbers() -> None:
    """Rounding has a shorter way for groups whose weights cannot be NaN."""
    spec = backends.parse("qint8")
    backend = backends.get(spec.scheme.backend)
    packed = backend.encode(torch.randn(16, 128).bfloat16(), spec)
    packed.parts["scale"][3], packed.parts["scale"][5] = torch.nan, torch.inf
    form = backend.form(packed)
    assert form is not None
    with np.errstate(invalid="ignore"):  # of infinity, which the reference computes with too
        decoded = multiplied(Native(), backend, packed, torch.bfloat16)
    for m in (1, 12):
        x = torch.rand(m, 128).bfloat16() + 1
        out = torch.empty(m, 16, dtype=torch.bfloat16)
        Native().product(form, packed.parts, x, None, out)
        wanted = F.linear(x.float(), decoded.float())
        assert torch.equal(out.isfinite(), wanted.isfinite()) and not out[:, 3].isfinite().any()
        fine = [row for row in range(16) if row not in (3, 5)]
        assert close(out[:, fine], x, decoded[fine], torch.zeros(14))

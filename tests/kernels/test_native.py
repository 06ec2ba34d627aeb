"""The kernels in C: the bits of the backends' own decoding, and products within the error of their sums."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from sdquant import backends
from sdquant.core.backend import Packed, Unfit
from sdquant.kernels.cpu import SWITCH, extension

from .reference import decoded, multiplied
from .test_packed_layout import SPECS

native = extension()
if native is None:
    pytest.skip("the C extension is not built", allow_module_level=True)

from sdquant.kernels.cpu import layout_descriptors  # noqa: E402
from sdquant.kernels.cpu.cpu_kernels import Native  # noqa: E402

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# Rows of whole vectors, of parts of one, groups that cross rows, one row, more than a kernel's panel and tile.
SHAPES = ((48, 384), (40, 64), (33, 128), (1, 256), (31, 80), (24, 32, 3, 3), (6, 64, 3, 3), (13, 1600), (5, 37))
ISAS = tuple(name for name in ("amx", "avx512bf16", "avx2", "portable") if native.choose(name))
native.choose("")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    assert native.choose(request.param)
    layout_descriptors._plan.cache_clear()
    yield request.param
    native.choose("")
    layout_descriptors._plan.cache_clear()


@cache
def packed_weights(text: str, dtype: torch.dtype) -> tuple[Packed, ...]:
    spec, found = backends.parse(text), []
    for shape in SHAPES:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        weight[0] *= 3
        with contextlib.suppress(Unfit):
            found.append(backends.get(spec.scheme.backend).encode(weight, spec))
    return tuple(found)


@pytest.mark.parametrize("text", SPECS)
def test_it_decodes_to_the_backends_bits(text: str, isa: str) -> None:
    reader, backend, seen = Native(), backends.get(backends.parse(text).scheme.backend), 0
    for dtype in DTYPES:
        for packed in packed_weights(text, dtype):
            form = backend.form(packed)
            if form is None:
                continue
            for wanted in DTYPES:
                assert reader.reads(form, packed.parts, wanted)
                out = torch.full((form.rows, form.columns), torch.nan, dtype=wanted)
                reader.decode_into(form, packed.parts, out)
                assert torch.equal(out.view(packed.spec.shape), backend.decode(packed, wanted)), (form, wanted)
                seen += 1
    assert seen >= 9


@pytest.mark.parametrize("text", SPECS)
def test_its_products_are_those_of_the_decoded_weight(text: str, isa: str) -> None:
    reader, backend = Native(), backends.get(backends.parse(text).scheme.backend)
    for packed in packed_weights(text, torch.bfloat16):
        form = backend.form(packed)
        if form is None:
            continue
        for dtype, half_ulp in zip(DTYPES, (2.0**-8, 2.0**-24, 2.0**-11), strict=True):
            for m in (1, 5, 20, 130):
                x = torch.randn(m, form.columns, generator=torch.Generator().manual_seed(m)).to(dtype)
                out = torch.full((m, form.rows), torch.nan, dtype=dtype)
                bias = torch.linspace(-1, 1, form.rows).to(dtype) if m > 1 else None
                reader.product(form, packed.parts, x, bias, out)
                weight = multiplied(reader, backend, packed, dtype).double().numpy()
                exact = x.double().numpy() @ weight.T
                # A sum of n products in float32 is off by at most n 2^-24 of the sum of their magnitudes, and then
                # comes the last rounding.
                bound = form.columns * 2.0**-24 * (np.abs(x.double().numpy()) @ np.abs(weight.T))
                if bias is not None:
                    exact = exact + bias.double().numpy()
                    bound = bound + 2.0**-24 * (np.abs(exact) + bound)
                bound = bound + half_ulp * (np.abs(exact) + bound) + 2.0**-25
                assert (np.abs(out.double().numpy() - exact) <= bound).all(), (form, dtype, m)


@pytest.mark.parametrize(
    ("text", "rows", "columns"), [("int8", 29, 6200), ("nf4", 26, 6208), ("q4_k", 25, 6400), ("qint4", 260, 4352)]
)
def test_rows_of_several_panels_by_several_batches(text: str, rows: int, columns: int, isa: str) -> None:
    """More columns than are decoded at once, more activations than are multiplied at once, rows that fill no panel; x
    and the results begin within a vector, and there is nothing of worth beside them."""
    reader, backend, spec = Native(), backends.get(backends.parse(text).scheme.backend), backends.parse(text)
    packed = backend.encode(torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)), spec)
    form = backend.form(packed)
    assert form is not None
    for dtype, half_ulp, m in zip(DTYPES, (2.0**-8, 2.0**-24, 2.0**-11), (199, 131, 193), strict=True):
        memory = torch.full((m * columns + 64,), torch.nan, dtype=dtype)
        x = memory[3 : 3 + m * columns].view(m, columns)
        x.copy_(torch.randn(m, columns, generator=torch.Generator().manual_seed(m)))
        results = torch.full((m * rows + 64,), torch.nan, dtype=dtype)
        out = results[5 : 5 + m * rows].view(m, rows)
        reader.product(form, packed.parts, x, None, out)
        weight = multiplied(reader, backend, packed, dtype).double()
        exact, sizes = x.double() @ weight.T, x.double().abs() @ weight.abs().T
        allowed = columns * 2.0**-24 * sizes + half_ulp * (exact.abs() + columns * 2.0**-24 * sizes) + 2.0**-24
        assert bool(((out.double() - exact).abs() <= allowed).all()), dtype
        assert bool(results[:5].isnan().all()) and bool(results[5 + m * rows :].isnan().all()), dtype


@pytest.mark.parametrize("text", ["qint8", "bnb-int8", "int8_sym", "int8", "fp8"])
def test_every_code_with_scales_of_both_signs(text: str, isa: str) -> None:
    """What encoders do not make: -128 where codes are symmetric, and negative scales."""
    reader, backend = Native(), backends.get(backends.parse(text).scheme.backend)
    packed = backend.encode(torch.randn(6, 1280, generator=torch.Generator().manual_seed(5)), backends.parse(text))
    form = backend.form(packed)
    assert form is not None
    codes, scale = packed.parts[form.codes], packed.parts[form.scale]
    every = torch.arange(codes.numel() * codes.element_size(), dtype=torch.int32).to(torch.uint8)
    if "float8" in str(codes.dtype):
        every[every & 127 == 127] = 0  # NaN
    signs = torch.tensor([1.0, -1.0]).repeat(-(-scale.numel() // 2))[: scale.numel()].view(scale.shape)
    parts = dict(packed.parts) | {form.codes: every.view(codes.dtype).view(codes.shape), form.scale: scale * signs}
    floats = torch.from_numpy(decoded(form, parts))
    for dtype in DTYPES:
        out = torch.empty(form.rows, form.columns, dtype=dtype)
        reader.decode_into(form, parts, out)
        assert torch.equal(out, floats.to(dtype)), dtype
        for m in (1, 2):
            x = torch.randn(m, form.columns, generator=torch.Generator().manual_seed(m)).to(dtype)
            y = torch.empty(m, form.rows, dtype=dtype)
            reader.product(form, parts, x, None, y)
            exact, sizes = x.double() @ out.double().T, x.double().abs() @ out.double().abs().T
            allowed = form.columns * 2.0**-24 * sizes + torch.finfo(dtype).eps * exact.abs()
            assert bool(((y.double() - exact).abs() <= allowed).all()), (dtype, m)


# Scales at which fast instructions round otherwise: subnormal ones, those whose products are, infinity and NaN.
ODD = (1e-44, 3e-39, 1e-37, 2.0**-80, 3e38, torch.inf, torch.nan, 0.0, -0.0, -1e-39)


@pytest.mark.parametrize(
    "text", ["nf4", "fp4", "fp8", "bnb-int8", "qint8", "qint4", "qint3", "int4", "int4_sym", "sdnq-uint4", "sdnq-fp8"]
)
def test_odd_scales_decode_as_the_form_says(text: str, isa: str) -> None:
    # Not the backend's bits: bitsandbytes' own kernel for nf4 takes subnormal numbers for zero.
    reader, backend = Native(), backends.get(backends.parse(text).scheme.backend)
    weight = torch.randn(len(ODD), 1280, generator=torch.Generator().manual_seed(4))
    packed = backend.encode(weight, backends.parse(text))
    form = backend.form(packed)
    assert form is not None
    scale = packed.parts[form.scale]
    each = torch.tensor(ODD).to(scale.dtype).repeat_interleave(scale.numel() // len(ODD)).view(scale.shape)
    packed = replace(packed, parts=dict(packed.parts) | {form.scale: each})
    with np.errstate(all="ignore"):
        floats = torch.from_numpy(decoded(form, dict(packed.parts)))
    for dtype in DTYPES:
        out = torch.empty(form.rows, form.columns, dtype=dtype)
        reader.decode_into(form, packed.parts, out)
        wanted = floats.to(dtype)
        assert torch.equal(out.isnan(), wanted.isnan()), dtype
        assert torch.equal(out.nan_to_num(7), wanted.nan_to_num(7)), dtype
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(2, form.columns, dtype=dtype)
        for m in (1, 2):
            y = torch.empty(m, form.rows, dtype=dtype)
            reader.product(form, packed.parts, x[:m], None, y)
            exact = floats.to(dtype).double().sum(1)
            finite = exact.abs() < 1e30
            assert int(finite.sum()) >= (6 if scale.dtype != torch.float16 else 5)
            assert torch.equal(y.isfinite().all(0) | ~finite, torch.ones(len(ODD), dtype=torch.bool))
            rtol = torch.finfo(dtype).eps + 1e-4
            assert torch.allclose(y[-1][finite].double(), exact[finite], rtol=rtol, atol=1e-3), (dtype, m)


@pytest.mark.parametrize("text", ["int4", "int4_sym", "qint4", "sdnq-uint4", "nf4"])
def test_products_with_one_element_are_weights_to_the_last_bit(text: str, isa: str) -> None:
    """Of every mantissa that a scale of 16 bits has, and the exponents at which the fast way of rounding ends. Weights
    that are not rounded are as near as that and the one rounding of the sum allow."""
    reader, backend = Native(), backends.get(backends.parse(text).scheme.backend)
    weight = torch.randn(4096, 128, generator=torch.Generator().manual_seed(6))
    packed = backend.encode(weight.to(torch.bfloat16), backends.parse(text))
    form = backend.form(packed)
    assert form is not None
    scale = packed.parts[form.scale]
    mantissas = 1 + torch.arange(scale.numel(), dtype=torch.float64) % 1024 / 1024
    exponents = torch.tensor([-6.0, 6.0, -15.0, 13.0])[torch.arange(scale.numel()) // 1024 % 4]
    each = (mantissas * 2.0**exponents).to(scale.dtype).view(scale.shape)
    packed = replace(packed, parts=dict(packed.parts) | {form.scale: each})
    for dtype in (torch.bfloat16, torch.float16):
        floats = multiplied(reader, backend, packed, dtype)
        wanted, off = floats.to(dtype), 2.0**-18 * packed.parts[form.scale].view(form.rows, -1).float()
        x, y = torch.zeros(1, form.columns, dtype=dtype), torch.empty(1, form.rows, dtype=dtype)
        for column in (0, 1, 63, 64, 127):
            x.zero_()[0, column] = 1
            reader.product(form, packed.parts, x, None, y)
            known = wanted.isfinite().all(1)
            assert int(known.sum()) > 3000
            if floats.dtype is dtype:
                assert torch.equal(y[0][known], wanted[known, column]), (dtype, column)
            else:
                allowed = 2.0**-8 * floats[known, column].abs() + off[known].amax(1)
                assert bool(((y[0][known] - floats[known, column]).abs() <= allowed).all()), (dtype, column)
            # What is inf in float16 is no number times 0.
            assert not bool(y[0][~known].isfinite().any()), (dtype, column)


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
def test_what_products_leave_behind_does_no_harm_to_others(bits: int, isa: str) -> None:
    """Scales of groups are in memory that nobody clears. A row that ends within a vector was multiplied with those of a
    longer row before it: zeros with NaN."""
    reader, backend = Native(), backends.get("rules")
    tiles, rows = (backends.parse(f"rules,weight_qtype=int{bits}{tile}") for tile in (",tile_size=16", ""))
    long = backend.encode(torch.randn(2, 1024), tiles)
    for dtype in DTYPES:
        for columns in (16, 48, 80):
            short = backend.encode(torch.randn(5, columns).to(dtype), rows)
            x, y = torch.ones(1, columns, dtype=dtype), torch.empty(1, 5, dtype=dtype)
            form, after = backend.form(long), backend.form(short)
            assert form is not None and after is not None
            parts = dict(long.parts) | {"scale": torch.full_like(long.parts["scale"], torch.nan)}
            nothing = torch.empty(1, 2, dtype=dtype)
            reader.product(form, parts, torch.ones(1, 1024, dtype=dtype), None, nothing)
            reader.product(after, short.parts, x, None, y)
            assert bool(nothing.isnan().all()) and bool(y.isfinite().all()), (dtype, columns)


@pytest.mark.parametrize("text", ["nf4", "qint4", "q4_k"])
def test_two_threads_compute_what_one_does(text: str) -> None:
    reader, backend = Native(), backends.get(backends.parse(text).scheme.backend)
    packed = backend.encode(torch.randn(1536, 1536).bfloat16(), backends.parse(text))
    form = backend.form(packed)
    assert form is not None
    found: list[tuple[torch.Tensor, ...]] = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = torch.empty(form.rows, form.columns, dtype=torch.bfloat16)
            reader.decode_into(form, packed.parts, out)
            found.append((out,))
            for m in (9, 41):
                y = torch.empty(m, form.rows, dtype=torch.bfloat16)
                x = torch.linspace(-1, 1, m * form.columns).bfloat16().view(m, -1)
                reader.product(form, packed.parts, x, None, y)
                found[-1] += (y,)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_switch_turns_them_off() -> None:
    code = (
        "from sdquant.kernels import cpu; from sdquant.kernels.cpu.cpu_kernels import native as reader\n"
        "print(cpu.extension(), cpu.isa(), reader(), cpu.state())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {SWITCH: "0"}, capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("None None None turned off by SDQUANT_NATIVE=0")


@pytest.mark.parametrize(("name", "runs"), [("portable", "portable"), ("sse", extension().isa())])  # type: ignore[union-attr]
def test_a_switch_names_an_instruction_set(name: str, runs: str) -> None:
    code = "from sdquant.kernels import cpu; print(cpu.isa())"
    environment = os.environ | {SWITCH: name}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == f"{runs}\n"
    assert ("SDQUANT_NATIVE=sse has no effect" in run.stderr) == (name == "sse")

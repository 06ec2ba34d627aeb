"""The kernels in C: the bits of the backends' own decoding, and products within the error of their sums."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sdquant import backends
from sdquant.backends.base import Packed, Unfit
from sdquant.kernels.native import extension

from .test_forms import SPECS

native = extension()
if native is None:
    pytest.skip("the C extension is not built", allow_module_level=True)

from sdquant.kernels.native import plans  # noqa: E402
from sdquant.kernels.native.reader import Native  # noqa: E402

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# Rows of whole vectors, of parts of one, groups that cross rows, one row, more than a kernel's panel and tile.
SHAPES = ((48, 384), (40, 64), (33, 128), (1, 256), (31, 80), (24, 32, 3, 3), (13, 1600), (5, 37))
ISAS = tuple(name for name in ("avx512bf16", "avx2", "portable") if native.choose(name))
native.choose("")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    assert native.choose(request.param)
    plans._plan.cache_clear()
    yield request.param
    native.choose("")
    plans._plan.cache_clear()


def packed_weights(text: str, dtype: torch.dtype) -> Iterator[Packed]:
    spec = backends.parse(text)
    for shape in SHAPES:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        weight[0] *= 3
        try:
            yield backends.get(spec.scheme.backend).encode(weight, spec)
        except Unfit:
            continue


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
            for m in (1, 5, 130):
                x = torch.randn(m, form.columns, generator=torch.Generator().manual_seed(m)).to(dtype)
                out = torch.full((m, form.rows), torch.nan, dtype=dtype)
                reader.product(form, packed.parts, x, out)
                weight = backend.decode(packed, dtype).view(form.rows, form.columns).double().numpy()
                exact = x.double().numpy() @ weight.T
                # A sum of n products in float32 is off by at most n 2^-24 of the sum of their magnitudes, and then
                # comes the last rounding.
                bound = form.columns * 2.0**-24 * (np.abs(x.double().numpy()) @ np.abs(weight.T))
                bound = bound + half_ulp * (np.abs(exact) + bound) + 2.0**-25
                assert (np.abs(out.double().numpy() - exact) <= bound).all(), (form, dtype, m)

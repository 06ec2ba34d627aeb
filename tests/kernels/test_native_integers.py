"""What surrounds products in integers, in C: the numbers of the formulas in `kernels/int8.py`, computed in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdquant import backends

from .test_native import DTYPES, isa, native, packed_weights  # noqa: F401

if native is None:
    pytest.skip("the C extension is not built", allow_module_level=True)

from sdquant.kernels.cpu import int8_epilogue


def quantized(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [m, k] -> int8 codes and float32 scales [m]."""
    largest = np.abs(values).max(1)
    zero = largest < 2.0**-100
    factor = np.where(zero, np.float32(0), np.float32(127) / np.where(zero, np.float32(1), largest))
    codes = np.rint(values * factor[:, None]).astype(np.int8)
    return codes, np.where(zero, np.float32(0), largest / np.float32(127))


@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (5, 512), (2, 1600)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_quantized(dtype: torch.dtype, shape: tuple[int, int], isa: str) -> None:  # noqa: F811
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[-1] = 0
    x[0, 0] = -4  # 127 / 4 is exact, so that halves are met: a code of 63.5 for 2
    x[0, 1:2] = 2
    wide = torch.cat([x, x], 1)[:, : shape[1]]  # rows that do not follow each other
    codes = torch.full(shape, 99, dtype=torch.int8)
    scales, sums = torch.empty(shape[0]), torch.empty(shape[0], dtype=torch.int32)
    int8_epilogue.quantize_rows(wide, codes, scales, sums)
    expected, scale = quantized(x.float().numpy())
    assert np.array_equal(codes.numpy(), expected)
    assert np.array_equal(scales.numpy(), scale)
    assert np.array_equal(sums.numpy(), expected.sum(1, dtype=np.int32))


def test_a_row_that_is_not_finite_has_such_a_scale(isa: str) -> None:  # noqa: F811
    x = torch.ones(3, 40)
    x[0, 3], x[1, 39] = torch.nan, torch.inf
    codes, scales, sums = torch.empty(3, 40, dtype=torch.int8), torch.empty(3), torch.empty(3, dtype=torch.int32)
    int8_epilogue.quantize_rows(x, codes, scales, sums)
    assert scales.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("text", ["nf4", "int4", "qint2", "sdnq-int6", "fp8", "q4_k"])
def test_weights_are_quantized_again(text: str, isa: str) -> None:  # noqa: F811
    backend, seen = backends.get(backends.parse(text).scheme.backend), 0
    for packed in packed_weights(text, torch.bfloat16):
        form = backend.form(packed)
        if form is None or not int8_epilogue.recodes(form, packed.parts):
            continue
        codes, scales = torch.empty(form.rows, form.columns, dtype=torch.int8), torch.empty(form.rows)
        int8_epilogue.recode(form, packed.parts, codes, scales)
        expected, scale = quantized(backend.decode(packed, torch.float32).view(form.rows, -1).numpy())
        assert np.array_equal(codes.numpy(), expected)
        assert np.array_equal(scales.numpy(), scale)
        seen += 1
    assert seen


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_become_floats(dtype: torch.dtype, extras: bool, isa: str) -> None:  # noqa: F811
    random, (m, n) = np.random.default_rng(3), (3, 1037)
    totals = random.integers(-(2**28), 2**28, (m, n), dtype=np.int32)
    sums, added = random.integers(-9999, 9999, m, dtype=np.int32), random.integers(-128, 128, n, dtype=np.int32)
    scales, weights = random.random(m, dtype=np.float32), random.random(n, dtype=np.float32) * np.float32(1e-6)
    bias = torch.from_numpy(random.standard_normal(n).astype(np.float32)).to(dtype)
    out = torch.full((m, n + 5), 7, dtype=dtype)
    int8_epilogue.finish(
        torch.from_numpy(totals), torch.from_numpy(sums), torch.from_numpy(added) if extras else None,
        torch.from_numpy(scales), torch.from_numpy(weights), bias if extras else None, out[:, :n],
    )  # fmt: skip
    whole = totals + sums[:, None] * added if extras else totals
    wanted = whole.astype(np.float32) * scales[:, None] * weights
    wanted = wanted + bias.float().numpy() if extras else wanted
    assert torch.equal(out[:, :n], torch.from_numpy(wanted).to(dtype))
    assert (out[:, n:] == 7).all()

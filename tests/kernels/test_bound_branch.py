"""Products in 8-bit integers that add a low-rank branch themselves: the bits of those by parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bench import pairs
from sdquant.kernels import int8_reference
from sdquant.kernels.base import Coding
from sdquant.kernels.cpu import int8, narrow
from sdquant.kernels.cpu.bound_branch import FewWithBranch, IntegersWithBranch

SIZE = 512

if not narrow.can(torch.float32, SIZE, 32) or int8.sizes(SIZE) is None:
    pytest.skip("no such kernels on this machine", allow_module_level=True)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def layer_of(scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a layer with a branch, of which no candidate is timed."""
    if not narrow.can(dtype, SIZE, 32):
        pytest.skip("no such kernels on this machine")
    monkeypatch.setattr(pairs, "SIZE", SIZE)
    monkeypatch.setenv("SDQUANT_TUNE", "0")
    torch.manual_seed(0)
    return pairs.layer(f"{scheme} with its branch", nn.Linear(SIZE, SIZE, dtype=dtype).requires_grad_(False), {})


def assert_agrees(got: torch.Tensor, layer: Any, x: torch.Tensor) -> None:
    """Assert that results have the bits of those by parts."""
    wanted = layer._linear(x, layer._bias(x))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rank", [2, 30, 32, 33, 130, 256, 258])
def test_float32_beside_integers(rank: int) -> None:
    """With AMX each is multiplied as two bfloat16: results as near as errors of 2^-17 in each factor leave them."""
    torch.manual_seed(0)
    down, up = torch.randn(SIZE, rank), torch.randn(SIZE, rank)
    for rows in (13, 32, 100):
        x, y = torch.randn(rows, SIZE), torch.randn(rows, SIZE)
        for is_turned in (False, True):
            got, factor = y.clone(), down.T.contiguous() if is_turned else down
            assert narrow.add_product(got, x, factor, up, is_turned=is_turned, in_halves=True)
            wanted = y.double() + x.double() @ down.double() @ up.double().T
            squares = x.double() ** 2 @ down.double() ** 2 @ up.T.double() ** 2  # of all products
            room = squares.sqrt() * 2**-13
            assert ((got.double() - wanted).abs() <= room).all()
            exact = y.clone()
            assert narrow.add_product(exact, x, factor, up, is_turned=is_turned)
            assert ((exact.double() - wanted).abs() <= squares.sqrt() * 2**-17).all()


@pytest.mark.parametrize("inputs", [32, 47, SIZE, SIZE + 7])
@pytest.mark.parametrize("rank", [2, 30, 32, 130, 256])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16], ids=str)
def test_factors_of_16_bits_beside_integers(of: torch.dtype, rank: int, inputs: int) -> None:
    """Those of bfloat16 have no low halves: the bits of the same factors in float32."""
    torch.manual_seed(0)
    down, up = torch.randn(inputs, rank).to(of), torch.randn(70, rank).to(of)
    for rows in (5, 13, 32, 100):
        x, y = torch.randn(rows, inputs), torch.randn(rows, 70)
        for is_turned in (False, True):
            got, wanted, factor = y.clone(), y.clone(), down.T.contiguous() if is_turned else down
            assert narrow.add_product(got, x, factor, up, is_turned=is_turned, in_halves=True)
            assert narrow.add_product(wanted, x, factor.float(), up.float(), is_turned=is_turned, in_halves=True)
            assert not torch.equal(got, y) and torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["sdnq-uint4,svd", "sdnq-int8,svd,hadamard", "svdquant_w4a4"])
def test_at_once_and_by_parts(scheme: str, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(f"{scheme} compute=int8", dtype, monkeypatch)
    size = int8.sizes(SIZE)
    assert size is not None
    for rows in (1, 12, 30, size.most, size.most + 70):
        x = torch.randn(rows, SIZE, dtype=dtype)
        y = layer(x)  # the first one is by parts
        at_once = layer._prepared.at_once
        assert isinstance(at_once, IntegersWithBranch)
        got = at_once(x, layer._parameters)
        assert_agrees(y, layer, x)
        # Of few rows the bound product rotates none, and leaves those to others that are more than its exact one takes.
        if got is None:
            assert rows == 12 or (rows == 1 and "hadamard" in scheme)
        else:
            assert_agrees(got, layer, x)
    for other in (x.half(), x.t().contiguous().t(), x.clone().requires_grad_()):
        assert at_once(other, layer._parameters) is None
    own = {**layer._parameters, at_once.factors.up: layer._parameters[at_once.factors.up].double()}
    assert at_once(x, own) is None


@pytest.mark.parametrize("compute", ["", " compute=int8"])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_float32_activations_and_factors_of_other_dtypes(
    of: torch.dtype, compute: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have factors of 16 bits, whatever a pipeline is loaded in: the numbers of those factors as float32."""
    layer, wide = (layer_of(f"svdquant_w4a4{compute}", torch.float32, monkeypatch) for _ in range(2))
    for name in ("smooth", "down", "up"):
        part = layer._parameters[f"packed_{name}"].to(of)
        layer._parameters[f"packed_{name}"] = nn.Parameter(part, requires_grad=False)
        wide._parameters[f"packed_{name}"] = nn.Parameter(part.float(), requires_grad=False)
    for rows in (1, 5, 30, 300):
        x = torch.randn(rows, SIZE)
        y, wanted = layer(x), wide(x)  # by parts
        got = layer._prepared.at_once(x, layer._parameters)
        assert torch.equal(y, wanted) and torch.equal(layer(x), wanted)
        is_left = not compute and x.numel() > layer._prepared.at_once.few.most
        assert is_left == (got is None) and (got is None or torch.equal(got, wanted))
    with torch.enable_grad():
        layer._parameters["packed_down"].requires_grad_()
        assert layer._prepared.at_once(torch.randn(5, SIZE), layer._parameters) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["sdnq-uint4,svd", "svdquant_w4a4"])
def test_a_few_rows_in_floats(scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(scheme, dtype, monkeypatch)
    for rows in (1, 5, 20, 1000):
        x = torch.randn(rows, SIZE, dtype=dtype)
        y, at_once = layer(x), layer._prepared.at_once
        assert isinstance(at_once, FewWithBranch)
        got, wanted = at_once(x, layer._parameters), layer._linear(x, layer._bias(x))
        is_left = rows > 5 and x.numel() > at_once.few.most  # with AMX a thousand are not
        assert torch.equal(y, wanted) and is_left == (got is None) and (got is None or torch.equal(got, wanted))
    for other in (x[:5].half(), x[:5, ::2], x[:5].to("meta"), x[:5].clone().requires_grad_(), x[:0]):
        assert at_once(other, layer._parameters) is None


@pytest.mark.parametrize("compute", ["", " compute=int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [2, 30, 34, 130, 258])
def test_ranks_and_sizes_that_fill_no_tile(
    rank: int, dtype: torch.dtype, compute: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "RANK", rank)
    monkeypatch.setattr(f"{__name__}.SIZE", 576)
    layer = layer_of(f"svdquant_w4a4{compute}", dtype, monkeypatch)
    layer(torch.zeros(20, 576, dtype=dtype))
    at_once = layer._prepared.at_once
    if isinstance(at_once, IntegersWithBranch):
        at_once.left = None
    found = 0
    for rows in (13, 31, 70, 300, 1100):
        x = torch.randn(rows, 576, dtype=dtype)
        got = at_once(x, layer._parameters)
        if got is not None:
            assert_agrees(got, layer, x)
            found += 1
    assert found or (dtype is torch.float32 and not compute)


@pytest.mark.parametrize("compute", ["", " compute=int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quotients_of_unusual_numbers(
    dtype: torch.dtype, compute: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels divide by means of reciprocals, which very small and large numbers, infinity and NaN do not have."""
    layer = layer_of(f"svdquant_w4a4{compute}", dtype, monkeypatch)
    x = torch.randn(300, SIZE, dtype=dtype)
    x[::7] *= 1e-30
    x[1::7] *= 1e30
    x[2::7, ::3] = 0
    x[3::7] = torch.nan
    for row, number in enumerate((torch.inf, -torch.inf, torch.nan, 1e-41, -0.0)):
        x[5 + 7 * row, 11] = number
    with torch.no_grad():
        layer.packed_smooth[:6] = torch.tensor([1e30, 1e-30, 3e38, 1e-38, 255.0, 0.00390625])
    y, at_once = layer(x), layer._prepared.at_once
    got = at_once(x, layer._parameters)
    for of in (y, got) if got is not None else (y,):
        assert_agrees(of, layer, x)


@pytest.mark.parametrize(
    ("compute", "of"),
    [("", torch.bfloat16), *((" compute=int8", of) for of in (torch.bfloat16, torch.float16, torch.float32))],
)
def test_quotients_of_all_numbers_of_bfloat16(compute: str, of: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product with a reciprocal does for bfloat16, if divisors have at most eleven bits."""
    layer = layer_of(f"svdquant_w4a4{compute}", torch.bfloat16, monkeypatch)
    digits = 1 + torch.arange(128) / 128  # all that the eight bits of a bfloat16 can be
    at = torch.arange(SIZE)
    column = torch.arange(0, SIZE, 4)
    divisors = {
        torch.bfloat16: digits[at // 4],
        torch.float16: 1 + (at * 2 + 1) / 1024,
        torch.float32: digits[at % 128] / (1 + (2 * (at * 37 % 128) + 1) / 256),  # quotients next to middles
    }
    layer(torch.zeros(20, SIZE, dtype=torch.bfloat16))
    at_once = layer._prepared.at_once
    if isinstance(at_once, IntegersWithBranch):
        at_once.left = None  # some numbers of rows to torch's product, which is as exact
    name = at_once.factors.smooth
    layer._parameters[name] = nn.Parameter(divisors[of].to(of), requires_grad=False)
    x = torch.zeros(len(column) * 128, SIZE, dtype=torch.bfloat16)
    x[torch.arange(len(x)), column.repeat_interleave(128)] = digits.repeat(len(column)).bfloat16()
    for some in x.split(256):
        got = at_once(some, layer._parameters)
        assert got is not None
        assert torch.equal(got, layer._linear(some, layer._bias(some)))


@pytest.mark.parametrize("scheme", ["svdquant_w4a4", "sdnq-uint4,hadamard"])
def test_inputs_with_scales_by_run_are_changed_before(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No format has such inputs beside a branch or a rotation, but one of another package may."""
    by_run = Coding.AGAIN | Coding.BY_RUN | Coding.BOTH
    monkeypatch.setattr(int8_reference, "coding", lambda packed, form: by_run)
    monkeypatch.setattr(pairs, "SIZE", SIZE)
    torch.manual_seed(0)
    floats = nn.Linear(SIZE, SIZE).requires_grad_(False)
    layer: Any = pairs.layer(f"{scheme} compute=int8 with its branch", floats, {})
    x = torch.randn(40, SIZE)
    exact = x @ layer.dequantize(torch.float32).T + floats.bias
    for y in (layer(x), layer._linear(x, layer._bias(x))):
        assert 0 < (y - exact).norm() < 0.03 * exact.norm()

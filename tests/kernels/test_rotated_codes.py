"""Rows that are rotated and quantized without the matrix have the codes and scales of those that are multiplied with
it, where the order of sums decides them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sdquant.core.hadamard import matrix, rotate_by_matrix
from sdquant.kernels import rotated_codes
from sdquant.kernels.cpu import extension
from sdquant.kernels.cpu.rotation import code_within, rotate_within
from sdquant.utils.tensors import divided

NATIVE: Any = extension()
needs_native = pytest.mark.skipif(NATIVE is None, reason="the C extension is not built")


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=_generator(seed))


def _halfway(rows: int, columns: int) -> Tensor:
    """Rotated, the first group of each row is 127, and so the scale is 1; the others are near the middle of two codes,
    with a number in each that is rounded away from the sums or not, as the order has it."""
    x = torch.randint(-40, 41, (rows, columns), generator=_generator(1)).float()
    x[:, :256] = 0
    x[:, 0] = 127 * 16
    for start in range(256, columns, 256):
        group = x[:, start : start + 256]
        group[:, 0] += group.sum(1) % 2  # all results are even then, and 8 more than a multiple of 16 often
        group[:, 7] = 2.0**-18 * torch.randint(1, 64, (rows,), generator=_generator(start)).float()
    return x


def _with(place: tuple[int, int], value: float) -> Tensor:
    x = _normal(40, 512)
    x[place] = value
    return x


ROWS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: _normal(256, 768),
    "heavy-tailed": lambda: _normal(256, 768) / _normal(256, 768, 1).abs().clamp(min=1e-3),
    "halfway": lambda: _halfway(64, 1024),
    "twice the largest": lambda: torch.cat([x := _normal(64, 256), -x, x], dim=1),
    "sums that cancel": lambda: torch.cat([x := 300 * _normal(64, 256), 1e-4 * _normal(64, 256) - x], dim=1),
    "zeros": lambda: torch.zeros(16, 512),
    "the smallest": lambda: 1e-39 * _normal(64, 512),
    "the largest": lambda: 1e37 * _normal(64, 512),
    "too large": lambda: 1e38 * _normal(64, 512),
    "infinity": lambda: _with((30, 300), torch.inf),
    "NaN": lambda: _with((3, 300), torch.nan),
    "few": lambda: _normal(3, 512),
}


def _scale(largest: Tensor) -> Tensor:
    return divided(largest, 127).clamp_(min=1e-30)


def _wanted(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    values = rotate_by_matrix(rows.float(), group)
    scale = _scale(values.abs().amax(1, keepdim=True))
    return (values / scale).round_().clamp_(-128, 127).to(torch.int8), scale


@pytest.mark.parametrize("group", rotated_codes.GROUPS)
@pytest.mark.parametrize("kind", ROWS)
def test_codes_are_those_of_the_matrix(kind: str, group: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows = ROWS[kind]().to(dtype)
        codes, scale = _wanted(rows, group)
        for given in (rows, rows.t().contiguous().t()):
            got = rotated_codes.quantize(given, group, _scale, -128, 127)
            assert torch.equal(got[0], codes), dtype
            assert torch.equal(got[1].nan_to_num(-1), scale.nan_to_num(-1)), dtype


@needs_native
def test_the_order_of_sums_decides_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the groups that are multiplied with the matrix after all there would be other codes."""
    rows = _halfway(64, 1024).to(torch.bfloat16)
    multiplied: list[int] = []
    by_matrix = rotated_codes._by_matrix

    def counted(rows: Tensor, group: int, index: Tensor) -> Tensor:
        multiplied.append(len(index))
        return by_matrix(rows, group, index)

    monkeypatch.setattr(rotated_codes, "_WORTHWHILE", 1)
    monkeypatch.setattr(rotated_codes, "_by_matrix", counted)
    wanted, scale = _wanted(rows, 256)
    assert torch.equal(rotated_codes.quantize(rows, 256, _scale, -128, 127)[0], wanted)
    assert 0 < sum(multiplied) <= 64 * 3 and bool((scale == 1).all())
    values, largest, bounds = torch.empty(64, 1024), torch.empty(64, 4), torch.empty(64, 4)
    assert rotate_within(rows, 256, values, largest, bounds)
    assert not torch.equal(code_within(values, 256, scale, torch.zeros_like(bounds), -128, 127)[0], wanted)


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "halfway", "sums that cancel"])
def test_any_order_is_within_the_bounds(kind: str, dtype: torch.dtype) -> None:
    rows = ROWS[kind]()[:12].to(dtype)
    columns = rows.shape[1]
    exact = rotate_by_matrix(rows.double(), 256)
    signs = matrix(256, torch.float32, torch.device("cpu"))
    results = []
    for name in ("portable", "avx2", ""):
        if NATIVE.choose(name):
            values, largest, bounds = (torch.empty(12, n) for n in (columns, columns // 256, columns // 256))
            assert rotate_within(rows, 256, values, largest, bounds)
            assert torch.equal(values.view(12, -1, 256).abs().amax(2), largest)
            results.append((values, bounds, *code_within(values, 256, _scale(largest), bounds, -7, 7)))
    assert len(results) >= 2 and all(map(torch.equal, one, results[0]) for one in results)
    values, bounds = (part.view(12, columns // 256, -1) for part in results[0][:2])
    assert bool(((values - exact.view_as(values)).abs() <= bounds / 2).all())
    terms = rows.float().view(12, -1, 1, 256) * signs  # [rows, groups, results, terms]
    for seed in range(8):
        order = terms.abs().sum((0, 1, 2)).argsort() if seed < 2 else torch.randperm(256, generator=_generator(seed))
        sums = torch.zeros(terms.shape[:3])
        for place in order if seed else order.flip(0):
            sums += terms[..., place]
        assert bool(((values - sums).abs() <= bounds).all())


def test_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _normal(64, 768).bfloat16()
    monkeypatch.setattr(rotated_codes, "rotate_within", lambda *_: False)
    assert all(map(torch.equal, rotated_codes.quantize(rows, 256, _scale, -128, 127), _wanted(rows, 256)))


@pytest.fixture(params=["default device", "default dtype", "autocast"])
def _settings_of_the_user(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "default dtype":
        torch.set_default_dtype(torch.float16)
        yield
        torch.set_default_dtype(torch.float32)
    else:
        with torch.device("meta") if request.param == "default device" else torch.autocast("cpu", torch.bfloat16):
            yield


@pytest.fixture
def weight() -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """A weight, and its codes and scales, before the settings change."""
    rows = _normal(64, 512).bfloat16()
    rotated_codes._sums_alike.cache_clear()
    yield rows, _wanted(rows, 256)
    rotated_codes._sums_alike.cache_clear()


@needs_native
@pytest.mark.usefixtures("weight", "_settings_of_the_user")
def test_settings_of_the_user_change_nothing(weight: tuple[Tensor, tuple[Tensor, Tensor]]) -> None:
    rows, wanted = weight
    assert all(map(torch.equal, rotated_codes.quantize(rows, 256, _scale, -128, 127), wanted))
    assert rotated_codes._sums_alike(256, torch.get_num_threads(), torch.get_float32_matmul_precision())
    assert rotated_codes._sums_alike.cache_info().misses == 1

"""Weights encoded some rows at a time: the same bits as at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sdquant import backends
from sdquant.backends import _bnb_arithmetic, _chunks
from sdquant.core.backend import TensorSpec, Unfit

SHAPES = [(96, 64), (33, 128), (24, 16, 3, 3), (9, 256), (8, 7)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", [row.name for row in backends.schemes() if row.on_the_fly])
def test_the_same_bits(
    scheme: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    backend, spec = backends.of_scheme(scheme), backends.parse(scheme)
    try:
        whole = backend.encode(weight, spec)
    except Unfit as unfit:
        pytest.skip(f"{scheme} cannot hold it: {unfit}")
    monkeypatch.setitem(_chunks.CHUNK, "cpu", 1)
    monkeypatch.setattr(_bnb_arithmetic, "TILE", 64)
    chunked = backend.encode(weight, spec)
    assert chunked.spec == whole.spec
    for name, part in whole.parts.items():
        assert part.dtype == chunked.parts[name].dtype and torch.equal(part, chunked.parts[name]), name


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 17, 40, 41])
def test_chunks_begin_at_whole_eights_and_none_is_a_single_row(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_chunks.CHUNK, "cpu", 1)
    weight, seen = torch.arange(rows * 4.0).view(rows, 4), []

    def encode(some: Tensor) -> dict[str, Tensor]:
        seen.append(len(some))
        return {"twice": some * 2, "pairs": some.reshape(-1, 2).sum(1)}

    layout = {
        "twice": TensorSpec(dtype="float32", shape=(rows, 4)),
        "pairs": TensorSpec(dtype="float32", shape=(rows * 2,)),
    }
    parts = _chunks.by_rows(weight, layout, encode)
    assert torch.equal(parts["twice"], weight * 2)
    assert torch.equal(parts["pairs"], weight.reshape(-1, 2).sum(1))
    assert sum(seen) == rows and (rows == 1 or 1 not in seen)
    assert all(count == 8 for count in seen[:-1]) and (rows < 16 or len(seen) > 1)

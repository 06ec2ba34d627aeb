"""Exact sums of integer codes, also where there is no float64: on Macs' GPUs and some of Intel's."""

from __future__ import annotations

import pytest
import torch

from sdquant.kernels import int_matmul
from sdquant.rules.core import batched_matmul, conv_general
from sdquant.rules.core.conv_general import Window
from sdquant.rules.core.how_to_quantize import HowToQuantize
from sdquant.rules.core.qarray import quantize


def codes(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Mixed ones, after a row with the largest sums that there are."""
    ends = torch.iinfo(dtype)
    made = torch.randint(
        ends.min, ends.max + 1, (rows, columns), generator=torch.Generator().manual_seed(rows), dtype=dtype
    )
    made[0] = ends.min
    return made


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int_matmul, "has_float64", lambda device: False)


@pytest.mark.parametrize("columns", [1, 5, 1024, 1025, 5000])
@pytest.mark.parametrize(("one", "other"), [("int8", "int8"), ("int16", "int16"), ("int8", "int16")])
def test_sums_are_exact(one: str, other: str, columns: int, without_float64: None) -> None:
    left, right = codes(3, columns, getattr(torch, one)), codes(4, columns, getattr(torch, other))
    assert torch.equal(int_matmul.exactly(left, right), left.long() @ right.long().T)


def test_so_are_convolutions(without_float64: None) -> None:
    left, right = codes(2, 6 * 25, torch.int8).view(2, 6, 5, 5), codes(4, 3 * 9, torch.int8).view(4, 3, 3, 3)
    window = Window.of(right.shape, 1, 1, 1, 2)
    wanted = torch.nn.functional.conv2d(left.double(), right.double(), None, 1, 1, 1, 2).long()
    assert torch.equal(conv_general.sums(left, right, ("int8", "int8"), window), wanted)


def test_so_are_products_of_activations(monkeypatch: pytest.MonkeyPatch, without_float64: None) -> None:
    how = HowToQuantize(qtype="int16", channelwise_axes=(0, 1))
    a = quantize(torch.randn(2, 3, 40), how)
    b = quantize(torch.randn(2, 40, 5), HowToQuantize(qtype="int16", channelwise_axes=(0, 2)))
    found = batched_matmul.multiply(a, b)
    monkeypatch.undo()
    assert torch.equal(found, batched_matmul.multiply(a, b))


def test_a_cpu_has_it() -> None:
    assert int_matmul.has_float64(torch.device("cpu"))

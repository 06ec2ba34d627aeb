"""Layers that share a weight and differ in something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sdquant


class Pair(nn.Module):
    """x -> first -> second, which have one weight."""

    def __init__(self, first: nn.Module, second: Any) -> None:
        super().__init__()
        self.first, self.second, self.other = first, second, nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


DIFFERENT = {
    "one bias": lambda: (Pair(nn.Linear(64, 64), nn.Linear(64, 64, bias=False)), (5, 64)),
    "two biases": lambda: (Pair(nn.Linear(64, 64), nn.Linear(64, 64)), (5, 64)),
    "dilation": lambda: (
        Pair(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.Conv2d(64, 64, 3, padding=2, dilation=2, bias=False)),
        (1, 64, 8, 8),
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_they_stay_floats(case: str, scheme: str) -> None:
    """One packed layer cannot take the place of both: the second computed with the bias of the first."""
    torch.manual_seed(0)
    net, shape = DIFFERENT[case]()
    x = torch.randn(shape)
    expected = net(x)
    sdquant.quantize(net, scheme, runtime="plain", progress=False)
    assert torch.equal(net(x), expected)
    assert type(net.other) is not nn.Linear


def test_those_that_do_not_differ_are_quantized() -> None:
    net = Pair(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    sdquant.quantize(net, "int8", progress=False)
    assert net.first is net.second and type(net.first) is not nn.Linear

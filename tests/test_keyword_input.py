"""Layers called with torch's name for their input: AnimateDiff's motion modules do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import sdquant
from sdquant.nn.quantized_layers import QuantizedLayer
from sdquant.rules import QtProvider, QtRule, quantize_model
from sdquant.rules.qt.layers import QtLayer

LAYERS = {
    "linear": (lambda: nn.Linear(64, 64), torch.randn(2, 64)),
    "conv1d": (lambda: nn.Conv1d(64, 64, 3), torch.randn(2, 64, 5)),
    "conv2d": (lambda: nn.Conv2d(64, 64, 3), torch.randn(2, 64, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(64, 64, 3), torch.randn(1, 64, 3, 4, 5)),
}
CASES = [(name, "int8", "plain") for name in LAYERS] + [
    ("linear", scheme, "library") for scheme in ("nf4", "bnb-int8", "qint8")
]  # fmt: skip


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(input=x)


@pytest.mark.parametrize(("name", "scheme", "runtime"), CASES)
def test_a_layer(name: str, scheme: str, runtime: str) -> None:
    make, x = LAYERS[name]
    net = sdquant.quantize(Net(make()).eval(), scheme, runtime=runtime)
    with torch.no_grad():
        assert type(net.layer) is not type(make())
        assert torch.equal(net(x), net.layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_is_trained(name: str) -> None:
    make, x = LAYERS[name]
    rule = QtRule(module_path=".*", weight_qtype="int8")
    net = quantize_model(Net(make()), QtProvider([rule]))
    assert type(net.layer) is not type(make())
    assert torch.equal(net(x), net.layer(x))


@pytest.mark.parametrize("kind", [*QuantizedLayer.__subclasses__(), *QtLayer.__subclasses__()])
def test_names_are_those_of_torch(kind: type[nn.Module]) -> None:
    base = next(base for base in kind.__mro__ if base.__module__.startswith("torch.nn"))
    assert list(inspect.signature(kind.forward).parameters) == list(inspect.signature(base.forward).parameters)

"""Under `torch.autocast` a quantized layer computes in the dtype in which the float layer with its weight does."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from sdquant import backends
from sdquant.kernels import scheme_activations
from sdquant.kernels.cpu import extension
from sdquant.nn import quantized_layer


@pytest.mark.parametrize("rows", [1, 300])  # the product of few rows, and of many
@pytest.mark.parametrize("text", ["nf4", "int8", "q8_0"])
def test_a_linear_layer(text: str, rows: int) -> None:
    torch.manual_seed(0)
    floats = nn.Linear(256, 64)
    layer = quantized_layer(floats, backends.of_scheme(text).encode(floats.weight.data, backends.parse(text)))
    floats.weight.data = layer.dequantize(torch.float32)
    x = torch.randn(rows, 256)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, wanted = layer(x), floats(x)
    assert got.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("padding", ["zeros", "reflect", "replicate", "circular"])
def test_a_convolution(padding: str) -> None:
    """Some kinds of padding autocast does in float32."""
    torch.manual_seed(0)
    floats = nn.Conv2d(64, 32, 3, padding=1, padding_mode=padding)
    layer = quantized_layer(floats, backends.of_scheme("int8").encode(floats.weight.data, backends.parse("int8")))
    floats.weight.data = layer.dequantize(torch.float32)
    x = torch.randn(1, 64, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, wanted = layer(x), floats(x)
    assert got.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)


@pytest.mark.skipif(extension() is None, reason="it is about the C kernels")
def test_quantized_activations_are_multiplied_by_the_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under autocast too, where they are first tried under it; and whatever the order of activations in memory."""
    torch.manual_seed(0)
    floats, backend = nn.Linear(256, 64), backends.get("rules")
    packed = backend.encode(floats.weight.data, backends.parse("rules,act_qtype=int8"))
    layer, x = quantized_layer(floats, packed), torch.randn(256, 9).T
    wanted = backend.linear(packed, x.bfloat16()) + layer.bias.bfloat16(), backend.linear(packed, x) + layer.bias

    def in_torch(*_: object) -> Tensor:
        raise AssertionError("computed in torch")

    monkeypatch.setattr(scheme_activations, "_verdicts", {})
    with torch.no_grad(), caplog.at_level(logging.WARNING, "sdquant"):
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)  # the check needs torch's numbers
        layer(x)
        monkeypatch.setattr(type(backend), "linear", in_torch)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), wanted[0])
        assert torch.equal(layer(x), wanted[1])
    assert not caplog.records

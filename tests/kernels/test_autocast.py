"""Under `torch.autocast` a quantized layer computes in the dtype in which the float layer with its weight does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sdquant import backends
from sdquant.layers import quantized_layer


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


def test_a_convolution() -> None:
    torch.manual_seed(0)
    floats = nn.Conv2d(64, 32, 3, padding=1)
    layer = quantized_layer(floats, backends.of_scheme("int8").encode(floats.weight.data, backends.parse("int8")))
    floats.weight.data = layer.dequantize(torch.float32)
    x = torch.randn(1, 64, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, wanted = layer(x), floats(x)
    assert got.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)

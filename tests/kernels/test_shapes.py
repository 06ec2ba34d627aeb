"""Layers and activations of shapes that few models have: one output, one input, one vector, nothing at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from sdquant import backends
from sdquant.kernels import int_matmul
from sdquant.nn import QuantizedLayer, quantized_layer

from .test_packed_layout import SPECS

if TYPE_CHECKING:
    from sdquant.core.backend import Packed

QUANTIZES_ACTIVATIONS = (
    "rules,act_qtype=int8", "rules,act_qtype=int8,tile_size=16", "rules,weight_qtype=nf4,act_qtype=int8",
    "rules,weight_qtype=float8_e4m3fn,act_qtype=float8_e4m3fn",
    "rules,weight_qtype=mxfp8,act_qtype=mxfp8,tile_size=32",
)  # fmt: skip


def packed(text: str, weight: Tensor) -> Packed:
    spec = backends.parse(text)
    return backends.get(spec.scheme.backend).encode(weight, spec)


def layer_of(text: str, floats: nn.Module, compute: str | None = None) -> QuantizedLayer:
    return quantized_layer(floats, packed(text, floats.weight.data), compute=compute)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [*SPECS, "q8_0", "q4_k"])
def test_one_output(text: str) -> None:
    torch.manual_seed(0)
    floats = nn.Linear(256, 1)
    layer = layer_of(text, floats)
    x = torch.randn(3, 256)
    floats.weight.data = layer.dequantize(torch.float32)
    for rows in (x, x[0], x[:0]):
        with torch.no_grad():
            torch.testing.assert_close(layer(rows), floats(rows))


@pytest.mark.parametrize("text", SPECS)
def test_one_output_of_a_convolution(text: str) -> None:
    torch.manual_seed(0)
    floats = nn.Conv2d(64, 1, 3, padding=1)
    layer = layer_of(text, floats)
    x = torch.randn(2, 64, 5, 4)
    floats.weight.data = layer.dequantize(torch.float32)
    for some in (x, x[0], x[:0]):
        with torch.no_grad():
            torch.testing.assert_close(layer(some), floats(some))


def test_the_product_of_one_column() -> None:
    """torch's own reads other memory there."""
    left = torch.arange(-128, 127, dtype=torch.int8).view(-1, 1)
    assert torch.equal(int_matmul.product(left, left[3:]), left.int() * left[3:].int().T)


@pytest.mark.parametrize("text", ["int8", "int8_sym", "qint8", "bnb-int8", "rules,act_qtype=int8"])
def test_one_input(text: str) -> None:
    torch.manual_seed(0)
    floats = nn.Linear(1, 40)
    layer = layer_of(text, floats, compute="int8")
    x = torch.randn(100, 1)
    floats.weight.data = layer.dequantize(torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), floats(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("text", ["nf4", "int8", *QUANTIZES_ACTIVATIONS])
def test_gradients_of_one_vector(text: str) -> None:
    torch.manual_seed(0)
    floats = nn.Linear(64, 32)
    layer = layer_of(text, floats)
    layer.bias.requires_grad_(True)  # type: ignore[union-attr]
    x = torch.randn(64, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.ones(32))  # type: ignore[union-attr, arg-type]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.dequantize(torch.float32).sum(0))


@pytest.mark.parametrize("text", QUANTIZES_ACTIVATIONS)
def test_no_activations_at_all(text: str) -> None:
    layer = layer_of(text, nn.Linear(32, 16))
    with torch.no_grad():
        assert layer(torch.empty(2, 0, 32)).shape == (2, 0, 16)


def test_no_images_at_all() -> None:
    layer = layer_of("rules,act_qtype=int8", nn.Conv2d(32, 16, 3))
    with torch.no_grad():
        assert layer(torch.empty(0, 32, 6, 5)).shape == (0, 16, 4, 3)


@pytest.mark.parametrize("text", [*SPECS, "q8_0", "q4_k"])
def test_a_table_in_which_nothing_is_looked_up(text: str) -> None:
    layer = layer_of(text, nn.Embedding(16, 256))
    assert layer(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 256)


def test_one_tile_of_powers_of_two() -> None:
    """Scales of eight bits, for which torch has no arithmetic."""
    torch.manual_seed(0)
    text = "rules,weight_qtype=mxfp8,act_qtype=mxfp8,tile_size=32"
    layer, x = layer_of(text, nn.Linear(32, 16, bias=False)), torch.randn(5, 32)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), backends.get("rules").linear(layer.packed, x))


@pytest.mark.parametrize("compute", [None, "int8"])
@pytest.mark.parametrize("text", ["nf4", "int8", "rules,act_qtype=int8"])
def test_a_kernel_larger_than_the_image(text: str, compute: str | None) -> None:
    floats = nn.Conv2d(128, 64, 3, dilation=2)
    layer, x = layer_of(text, floats, compute), torch.randn(1, 128, 4, 9)
    for run in (floats, layer):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"(?i)kernel"):
            run(x)

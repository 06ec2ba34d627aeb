"""Layers whose calls are traced, or made with tensors that have no values: kernels read memory by its address, so such
calls have to be operators of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import sdquant
from sdquant import backends, demo
from sdquant.kernels.dispatch_guard import plain, seen
from sdquant.nn import quantized_layer

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(256, 64),
    "conv": lambda: nn.Conv2d(64, 64, 3, padding=1),
    "embedding": lambda: nn.Embedding(96, 256),
}
SCHEMES = [("int8", None), ("int8", "int8"), ("nf4", None), ("q8_0", None), ("q4_k", "int8"), ("sdnq-uint4", None)]


def made(kind: str, scheme: str, compute: str | None = None) -> Any:
    torch.manual_seed(0)
    floats = LAYERS[kind]().bfloat16().requires_grad_(False)
    packed = backends.of_scheme(scheme).encode(floats.weight, backends.parse(scheme))
    return quantized_layer(floats, packed, compute=compute)


def given(kind: str, seed: int = 1, rows: int = 80) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    if kind == "embedding":
        return torch.randint(96, (2 * rows,), generator=random)
    shape = (rows, 256) if kind == "linear" else (2, 64, 12, 12)
    return torch.randn(*shape, generator=random).bfloat16()


def cases() -> list[Any]:
    return [
        (kind, scheme, compute)
        for kind in LAYERS
        for scheme, compute in SCHEMES
        if not (kind == "embedding" and compute) and not (kind == "conv" and scheme == "q4_k")
    ]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(("kind", "scheme", "compute"), cases())
def test_fake_tensors(kind: str, scheme: str, compute: str | None, used: bool) -> None:
    """Of fake activations, and of a layer that is fake itself; before its first call and after it."""
    layer, x = made(kind, scheme, compute), given(kind)
    wanted = made(kind, scheme, compute)(x)
    if used:
        layer(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for _ in range(2):
            y = layer(mode.from_tensor(x))
            assert type(y) is FakeTensor and (y.shape, y.dtype) == (wanted.shape, wanted.dtype)
            assert not plain(y) and seen(y)
            for name, tensor in layer.named_parameters():
                layer._parameters[name] = nn.Parameter(mode.from_tensor(tensor.data), requires_grad=False)
        assert layer.dequantize().shape == layer.weight.shape


# A DeprecationWarning, and from torch 2.15 on a FutureWarning.
@pytest.mark.filterwarnings("ignore:.torch.jit.trace(_method)?. is deprecated")
@pytest.mark.parametrize("rows", [1, 80])
@pytest.mark.parametrize(("kind", "scheme", "compute"), cases())
def test_traced(kind: str, scheme: str, compute: str | None, rows: int) -> None:
    """What was traced computes with what it is given, not with what it was traced with."""
    layer, x, other = made(kind, scheme, compute), given(kind, 1, rows), given(kind, 2, rows)
    wanted = layer(other)
    assert not torch.equal(layer(x), wanted)
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(layer, x, check_trace=False)(other), wanted)
        assert torch.equal(make_fx(lambda one: layer(one))(x)(other), wanted)
        assert torch.equal(torch.export.export(layer, (x,), strict=False).module()(other), wanted)


def test_a_mode_that_looks_on_changes_nothing() -> None:
    model = sdquant.load_model(demo.path("digits-sd") / "unet", "int8", compute="int8", progress=False)
    x, text = torch.randn(1, 4, 8, 8).bfloat16(), torch.randn(1, 8, model.config.cross_attention_dim).bfloat16()
    with torch.no_grad():
        wanted = model(x, 1, text).sample
        with FlopCounterMode(display=False):
            assert torch.equal(model(x, 1, text).sample, wanted)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            shape = model(mode.from_tensor(x), 1, mode.from_tensor(text)).sample
    assert type(shape) is FakeTensor and shape.shape == wanted.shape


def test_plain_calls_are_not_seen() -> None:
    x = torch.zeros(2)
    assert not seen(x) and plain(x) and plain(nn.Parameter(x)) and seen(nn.Parameter(x))
    assert not seen(x)
    with torch.inference_mode():
        assert not seen(torch.zeros(2))

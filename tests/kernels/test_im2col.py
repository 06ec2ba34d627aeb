"""Patches of images, and convolutions that are products with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sdquant import backends
from sdquant.core.backend import Geometry
from sdquant.kernels import dispatch
from sdquant.kernels.im2col import few_patches, outputs, patches
from sdquant.nn import quantized_layer

GEOMETRIES = [
    Geometry(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1),
    Geometry(stride=(2, 1), padding=(0, 2), dilation=(1, 1), groups=1),
    Geometry(stride=(1, 2), padding=(2, 0), dilation=(2, 1), groups=1),
]


@pytest.mark.parametrize("how", GEOMETRIES, ids=lambda how: f"{how.stride}-{how.padding}-{how.dilation}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_they_are_those_that_torch_unfolds(dtype: torch.dtype, how: Geometry) -> None:
    x = torch.randn(2, 3, 5, 4).to(dtype)
    assert not isinstance(how.padding, str)
    unfolded = F.unfold(x, (3, 2), dilation=how.dilation, padding=how.padding, stride=how.stride)
    wanted = unfolded.transpose(1, 2).reshape(-1, 18)
    assert torch.equal(patches(x, (3, 2), how).reshape(-1, 18), wanted)
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        got = few_patches(given, (3, 2), how, 1 << 20)
        assert got is not None and torch.equal(got, wanted) and got.is_contiguous()
    assert few_patches(x, (3, 2), how, len(wanted) - 1) is None


@pytest.mark.parametrize("how", GEOMETRIES, ids=lambda how: f"{how.stride}-{how.padding}-{how.dilation}")
@pytest.mark.parametrize("text", ["nf4", "int8", "q8_0", "sdnq-int8"])
def test_few_outputs_are_multiplied_and_are_those_of_the_decoded_weight(text: str, how: Geometry) -> None:
    spec = backends.parse(text)
    conv = nn.Conv2d(32, 40, (3, 2), stride=how.stride, padding=how.padding, dilation=how.dilation)
    packed = backends.get(spec.scheme.backend).encode(conv.weight.data, spec)
    layer = quantized_layer(conv, packed)
    calls: list[int] = []
    x = torch.randn(1, 32, 7, 6)
    places = outputs(x.shape[2:], (3, 2), how)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
        real = dispatch._product
        patched.setattr(dispatch, "_product", lambda *args: calls.append(len(args[3])) or real(*args))
        got = layer(x)
        conv.weight.copy_(layer.dequantize())
        wanted = conv(x)
    few, rows = dispatch.way(layer._backend, packed, layer._form, x.dtype).few_patches, places[0] * places[1]
    assert calls == ([rows] if rows <= few else [])
    assert got.is_contiguous()
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("text", ["nf4", "int8", "q8_0"])
def test_nothing_gives_nothing(text: str) -> None:
    spec = backends.parse(text)
    for module, x in ((nn.Linear(64, 40), torch.empty(0, 64)), (nn.Conv2d(32, 40, 1), torch.empty(0, 32, 4, 4))):
        packed = backends.get(spec.scheme.backend).encode(module.weight.data, spec)
        assert quantized_layer(module, packed)(x).shape == module(x).shape

"""What would write into a packed weight, or into a view of it, is refused by the layer's name; reading stays right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdquant import backends, offload
from sdquant.errors import IncompatibleError
from sdquant.models.weight_loader import install_packed
from sdquant.nn.read_only import View

SCHEMES = ("nf4", "nf4,double_quant", "fp8", "bnb-int8", "qint8", "qint4", "int8", "int4", "q8_0", "q4_k", "sdnq-int8")

# What people write, by name: each gets `layer.weight`, of two dimensions or more.
WRITES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda w: w.__setitem__(0, 0),
    "by a mask": lambda w: w.__setitem__(w > 0, 0),
    "a row's view": lambda w: w[0].zero_(),
    "a view of .data": lambda w: w.data[:2].add_(1),
    "a view of a view": lambda w: w.view(-1)[:10].zero_(),
    "detached": lambda w: w.detach()[0].zero_(),
    "transposed": lambda w: w.transpose(0, 1).mul_(2),
    "chunks": lambda w: [part.zero_() for part in w.chunk(2)],
    "iterated": lambda w: [row.zero_() for row in w],
    "flattened": lambda w: w.flatten().zero_(),
    "as bytes": lambda w: w.view(torch.int16).zero_(),
    "the same dtype": lambda w: w.to(w.dtype).zero_(),
    "copy_": lambda w: w.copy_(torch.zeros(w.shape)),
    "mul_": lambda w: w.mul_(2),
    "foreach": lambda w: torch._foreach_mul_([w, torch.zeros(2)], 2),
    "out": lambda w: torch.zeros(w.shape, out=w),
    "orthogonal": torch.nn.init.orthogonal_,
    "kaiming": torch.nn.init.kaiming_uniform_,
    "truncated": torch.nn.init.trunc_normal_,
    "vector": lambda w: torch.nn.utils.vector_to_parameters(torch.zeros(w.numel()), [w]),
    "data": lambda w: setattr(w, "data", torch.zeros(w.shape)),
    "data of a view": lambda w: setattr(w[0], "data", torch.zeros(w[0].shape)),
    "grad": lambda w: setattr(w, "grad", torch.zeros(w.shape)),
    "DLPack": lambda w: torch.from_dlpack(w).zero_(),
    "shared": lambda w: w.share_memory_(),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleDict({"conv": nn.Conv2d(64, 32, 2), "proj": nn.Linear(256, 64)})

    def forward(self, x: Tensor) -> Tensor:
        conv, proj = self.body["conv"], self.body["proj"]
        assert isinstance(conv, nn.Conv2d)
        return proj(conv(x).flatten(1)[:, :256])  # type: ignore[no-any-return]


def quantized(scheme: str = "int8") -> Any:
    net, spec = Net(), backends.parse(scheme)
    for path in ("body.conv", "body.proj"):
        packed = backends.get(spec.scheme.backend).encode(net.get_parameter(f"{path}.weight").detach(), spec)
        install_packed(net, (f"{path}.weight",), packed, "plain")
    return net


def layers(net: Any) -> dict[str, Any]:
    return {path: module for path, module in net.named_modules() if hasattr(module, "dequantize")}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_names_the_layer_and_the_way_out(how: str) -> None:
    net = quantized()
    assert set(layers(net)) == {"body.conv", "body.proj"}
    for path, layer in layers(net).items():
        before = layer.dequantize()
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with (
                context(),
                pytest.raises(IncompatibleError, match=rf"^Cannot write to the weight of '{path}'") as raised,
            ):
                WRITES[how](layer.weight)
            assert "quantize" in raised.value.fix or "LoRA" in raised.value.fix
        assert torch.equal(layer.dequantize(), before)


@pytest.mark.parametrize("how", [lambda w: w.requires_grad_(), lambda w: setattr(w, "requires_grad", True)])
def test_training_it_is_refused(how: Callable[[Any], Any]) -> None:
    layer = quantized().body["proj"]
    with pytest.raises(IncompatibleError, match=r"^Cannot train the weight of 'body\.proj'.*add_lora"):
        how(layer.weight)
    assert layer.weight.requires_grad_(False).requires_grad is False


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_scheme_loses_a_write(scheme: str) -> None:
    for path, layer in layers(quantized(scheme)).items():
        for how in ("a view of a view", "a view of .data"):
            with pytest.raises(IncompatibleError, match=f"'{path}'"):
                WRITES[how](layer.weight)


@pytest.mark.parametrize("mode", ["model", "sequential", "balanced", "group"])
def test_an_offloaded_one_is_not_written_to_either(mode: str, tmp_path: Any) -> None:
    net, x = quantized(), torch.randn(1, 64, 9, 9)
    wanted = net(x)
    handle = offload.apply(net, mode, device="cpu", folder=tmp_path)
    for path, layer in layers(net).items():
        with pytest.raises(IncompatibleError, match=f"'{path}'"):
            layer.weight.mul_(2)
        with pytest.raises(IncompatibleError, match="Cannot train"):
            layer.weight.requires_grad_()
    assert torch.equal(net(x), wanted)
    handle.remove()


def test_views_have_the_values() -> None:
    layer = quantized().body["proj"]
    real, x = layer.dequantize(), torch.randn(3, 256)
    weight = layer.weight
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(F.linear(x, weight), F.linear(x, real))
            assert torch.equal(weight[2:5, ::3] * 2, real[2:5, ::3] * 2) and torch.equal(weight.T.T, real)
            assert type(weight.double()) is Tensor and torch.equal(weight.double().mul_(2), real.double() * 2)
            assert type(weight[0].clone()) is Tensor and weight[0].tolist() == real[0].tolist()
            assert isinstance(weight[0], View) and repr(weight[0]) == repr(real[0])
            assert (weight[1].shape, weight.T.stride()) == (real[1].shape, real.T.stride())


def test_arrays_are_read_only() -> None:
    layer = quantized().body["conv"]
    for array, real in (
        (np.asarray(layer.weight), layer.dequantize()),
        (layer.weight[0].numpy(), layer.dequantize()[0]),
    ):
        assert np.array_equal(array, real.numpy())
        with pytest.raises(ValueError, match="read-only"):
            array.fill(0)

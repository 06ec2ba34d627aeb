"""Layers for training: what they share with float ones, and what they compute as the quantized ones do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sdquant.demo import path as demo
from sdquant.rules.model_quantization import quantize_model
from sdquant.rules.providers.ptq import PtqProvider
from sdquant.rules.qconfig import QtRule
from sdquant.rules.qt import QtLayer, QtProvider, collecting, quant_stats

INT8 = {"weight_qtype": "int8", "act_qtype": "int8"}
MODULES = {
    "linear": (lambda: nn.Linear(32, 6), (2, 5, 32)),
    "row": (lambda: nn.Linear(32, 6, bias=False), (32,)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding="same", groups=2), (2, 4, 7, 7)),
    "no batch": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 7)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 7, 7)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2, padding=1), (2, 4, 3, 3, 3)),
}
RULES: dict[str, dict[str, Any]] = {
    "w8a8": INT8,
    "w4a8": {"weight_qtype": "int4", "act_qtype": "int8"},
    "int4": {"weight_qtype": "int4"},
    "nf4": {"weight_qtype": "nf4"},
    "fp8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
    "minmax": {**INT8, "act_calibration_method": "minmax"},
    "whole": {**INT8, "disable_channelwise_axes": True},
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", MODULES)
def test_it_computes_what_the_quantized_layer_does(kind: str, name: str, dtype: torch.dtype) -> None:
    make, shape = MODULES[kind]
    module, x = make().to(dtype), torch.randn(shape, dtype=dtype)
    rule = QtRule(**RULES[name])
    with torch.no_grad():
        trained, run = QtProvider([]).layer(module, rule, "a")(x), PtqProvider([]).layer(module, rule, "a")(x)
        assert trained.dtype == dtype
        if rule.act_qtype is None:  # a float product, whose kernels add in their own order
            torch.testing.assert_close(trained, run)
        else:
            assert torch.equal(trained, run)
        assert torch.nn.functional.cosine_similarity(trained.flatten(), module(x).flatten(), 0) > 0.97


@pytest.mark.parametrize("kind", MODULES)
def test_checkpoints_are_those_of_the_float_layer(kind: str) -> None:
    module = MODULES[kind][0]()
    layer = QtProvider([]).layer(module, QtRule(**INT8, act_static_scale=True), "a")
    assert isinstance(layer, type(module)) and isinstance(layer, QtLayer)
    assert layer.rule.weight_qtype == "int8"
    assert dict(layer.named_parameters()) == dict(module.named_parameters())
    assert layer.state_dict().keys() == module.state_dict().keys()
    module.load_state_dict(layer.state_dict())
    copied = copy.deepcopy(layer)
    assert copied.rule == layer.rule and copied.get_parameter("weight") is not layer.get_parameter("weight")
    x = torch.randn(MODULES[kind][1])
    assert torch.equal(copied(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["w8a8", "int4", "fp8"])
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_autocast(kind: str, name: str, dtype: torch.dtype) -> None:
    """As a layer of that dtype; parameters and their gradients stay float32."""
    make, shape = MODULES[kind]
    module, x = make(), torch.randn(shape)
    rule = QtRule(**RULES[name], bwd_qtype="int8")
    layer, lower = (QtProvider([]).layer(one, rule, "a") for one in (module, copy.deepcopy(module).to(dtype)))
    into = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        y = layer(into)
    wanted = lower(x.to(dtype))
    assert y.dtype == dtype and torch.equal(y, wanted)
    y.float().square().sum().backward()
    wanted.float().square().sum().backward()
    made, other = layer.get_parameter("weight").grad, lower.get_parameter("weight").grad
    assert made is not None and other is not None and into.grad is not None
    assert made.dtype == into.grad.dtype == torch.float32
    assert torch.equal(made.to(dtype), other)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.Linear(16, 16), nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(torch.nn.functional.silu(self.first(x)))
        return result


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("bwd", [None, "int8"])
def test_gradient_checkpointing(bwd: str | None, reentrant: bool) -> None:
    """The same gradients, less that is kept, and no batch counted twice."""
    rule = {**INT8, "bwd_qtype": bwd, "bwd_stochastic_rounding": "uniform" if bwd else None, "act_static_scale": True}
    model = quantize_model(Block(), QtProvider([rule]))
    x = torch.randn(2, 4, 16, requires_grad=True)

    def gradients(*, saving: bool) -> tuple[list[Tensor], int]:
        model.zero_grad()
        kept: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = checkpoint(model, x, use_reentrant=reentrant) if saving else model(x)
        torch.manual_seed(5)
        y.square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()], sum(kept)

    (plain, all_bytes), (saved, few_bytes) = gradients(saving=False), gradients(saving=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, saved, strict=True))
    assert few_bytes < all_bytes
    with collecting(model):
        gradients(saving=True)
    assert {int(value) for name, value in quant_stats(model).items() if name.endswith("count")} == {1}


@pytest.mark.parametrize(("bwd", "shares"), [("int8", 0.4), (None, 1.1)])
def test_codes_are_kept_for_the_backward_pass(bwd: str | None, shares: float) -> None:
    """A quarter of the memory of float32, and scales."""
    layer = QtProvider([]).layer(nn.Linear(256, 256, bias=False), QtRule(**INT8, bwd_qtype=bwd), "a")
    kept: list[int] = []
    x = torch.randn(64, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel() * tensor.element_size()) or tensor, lambda tensor: tensor
    ):
        layer(x)
    assert 0.2 < sum(kept) / (4 * (64 * 256 + 256 * 256)) < shares


def test_frozen_weights_cost_nothing() -> None:
    layer = QtProvider([]).layer(nn.Linear(8, 4), QtRule(**INT8, bwd_qtype="int8"), "a").requires_grad_(False)
    x = torch.randn(2, 8, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0 and layer.get_parameter("weight").grad is None


def test_a_shipped_model_trains() -> None:
    """Under quantized gradients it comes nearer to the float model's answer, and it answers what PTQ would."""
    from diffusers import UNet2DConditionModel

    folder = demo("digits-sd") / "unet"
    floats, start = (UNet2DConditionModel.from_pretrained(folder) for _ in range(2))
    rule = {"weight_qtype": "int4", "act_qtype": "int8", "bwd_qtype": "int8", "bwd_stochastic_rounding": "uniform"}
    model = quantize_model(start, QtProvider([rule]))
    assert sum(isinstance(module, QtLayer) for module in model.modules()) > 40
    assert model.state_dict().keys() == floats.state_dict().keys()
    x, text = torch.randn(2, 4, 8, 8), torch.randn(2, 4, floats.config.cross_attention_dim)
    with torch.no_grad():
        wanted = floats(x, 100, text).sample
        assert torch.equal(model(x, 100, text).sample, quantize_model(start, PtqProvider([rule]))(x, 100, text).sample)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-4), []
    for _ in range(6):
        loss = (model(x, 100, text).sample - wanted).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0], losses

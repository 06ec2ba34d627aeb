"""PEFT's adapters on single layers of every scheme: what they add, where gradients go, and that the base stays."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sdquant
from sdquant import backends
from sdquant.core.backend import Unfit
from sdquant.errors import ConflictError, IncompatibleError
from sdquant.nn import packed_of, quantized_layer
from sdquant.nn.layer_factory import float_layer
from sdquant.rules import QuantizationRule

from .conftest import config, peft

LIBRARY = [("nf4", "linear"), ("fp4", "linear"), ("bnb-int8", "linear")] + [
    (scheme, kind) for scheme in ("qint8", "qint4", "qint2", "qfloat8") for kind in ("linear", "conv")
]

SEARCHED = ("iq1", "iq2")  # seconds for each weight: the codes are searched for


def floats(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(256, 64) if kind == "linear" else nn.Conv2d(64, 32, 2, padding=1)


def inputs(kind: str) -> torch.Tensor:
    return torch.randn(*((3, 256) if kind == "linear" else (2, 64, 5, 5)), generator=torch.Generator().manual_seed(1))


def plain(scheme: str, kind: str) -> nn.Module:
    layer, spec = floats(kind), backends.parse(scheme)
    try:
        packed = backends.get(spec.scheme.backend).encode(layer.weight.detach(), spec)  # type: ignore[union-attr, arg-type]
    except Unfit as why:
        pytest.skip(str(why))
    return quantized_layer(layer, packed)


def adapted(base: nn.Module, **more: Any) -> nn.Sequential:
    """The layer in a model, with a LoRA on it."""
    model = nn.Sequential(base)
    torch.manual_seed(2)
    peft.inject_adapter_in_model(config(["0"], **more), model)
    return model


def added(model: nn.Sequential, x: torch.Tensor) -> np.ndarray:
    """What the LoRA is to add, computed apart: alpha / rank * B A x, float64."""
    layer: Any = model[0]
    a, b = (side["default"].weight.detach().double().numpy() for side in (layer.lora_A, layer.lora_B))
    if a.ndim == 2:
        return 2.0 * (x.double().numpy() @ a.T @ b.T)  # type: ignore[no-any-return]
    padded = np.pad(x.double().numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (2, 2), (2, 3))
    return 2.0 * np.einsum("nchwij,rcij,or->nohw", windows, a, b[:, :, 0, 0])


def check(base: nn.Module, kind: str) -> None:
    x = inputs(kind)
    packed = packed_of(base)
    assert packed is not None
    bits = {name: part.clone() for name, part in packed.parts.items()}
    with torch.no_grad():
        before = base(x)
    model = adapted(base)
    layer: Any = model[0]
    assert all(p.device == x.device for p in model.parameters())
    with torch.no_grad():
        change = (model(x) - before).double().numpy()
    np.testing.assert_allclose(change, added(model, x), atol=2e-5 * float(before.abs().max()) + 2e-5)
    model(x.requires_grad_()).square().mean().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {"0.lora_A.default.weight", "0.lora_B.default.weight"}
    layer.delete_adapter("default")
    with torch.no_grad():
        assert torch.equal(model(x), before)
    after = packed_of(layer.base_layer)
    assert after is not None and all(torch.equal(part, after.parts[name]) for name, part in bits.items())


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(row.name, marks=[pytest.mark.slow] if row.name.startswith(SEARCHED) else [])
        for row in backends.schemes()
        if row.name not in ("rules", "sdnq-other")
    ],
)
def test_plain_layers(scheme: str, kind: str) -> None:
    check(plain(scheme, kind), kind)


@pytest.mark.parametrize(("scheme", "kind"), LIBRARY)
def test_library_modules(scheme: str, kind: str) -> None:
    model = nn.Sequential(floats(kind))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the libraries say while they are imported
        sdquant.quantize(model, scheme, runtime="library", progress=False)
        assert not isinstance(model[0], sdquant.nn.QuantizedLayer)  # type: ignore[attr-defined]
        check(model[0], kind)


@pytest.mark.parametrize("act", [None, "int8"])
def test_rules(act: str | None) -> None:
    model = nn.Sequential(floats("linear"))
    rule = QuantizationRule(weight_qtype="int8", act_qtype=act)
    sdquant.quantize(model, rules=[rule], progress=False)
    check(model[0], "linear")


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("scheme", ["int8", "nf4", "qint8", "sdnq-int8"])
def test_dora_is_that_of_the_decoded_weight(scheme: str, kind: str) -> None:
    base = plain(scheme, kind)
    models = [adapted(layer, use_dora=True) for layer in (base, float_layer(base))]  # type: ignore[arg-type]
    for model in models:
        layer: Any = model[0]
        layer.lora_magnitude_vector["default"].weight.data.mul_(1.1)
    one, other = (model(inputs(kind)) for model in models)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


class TestWeight:
    """`layer.weight` of a packed layer."""

    def test_it_has_the_values(self) -> None:
        layer: Any = plain("int8", "linear")
        weight, real = layer.weight, layer.dequantize()
        assert (weight.shape, weight.dtype, weight.device) == (real.shape, real.dtype, real.device)
        assert torch.equal(weight.norm(dim=1), real.norm(dim=1)) and torch.equal(weight.data @ real.T, real @ real.T)
        assert torch.equal(weight.to(torch.float64), real.double()) and np.array_equal(weight.numpy(), real.numpy())
        assert type(weight.clone()) is torch.Tensor and weight.tolist() == real.tolist()
        for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
            assert torch.equal(copied, real)

    def test_it_is_not_written_to(self) -> None:
        layer: Any = plain("int8", "linear")
        before = layer.dequantize()
        for write in (
            lambda: layer.weight.data.add_(1),
            lambda: layer.weight.copy_(torch.zeros(64, 256)),
            lambda: torch.add(torch.zeros(64, 256), 1, out=layer.weight),
            lambda: setattr(layer.weight, "data", before),
            lambda: torch.nn.init.zeros_(layer.weight),
        ):
            with pytest.raises(IncompatibleError, match=r"^Cannot write to a weight \[.*\] in int8"):
                write()
        assert torch.equal(layer.dequantize(), before)

    def test_merging_into_it_is_refused(self) -> None:
        for safe in (False, True):
            layer: Any = adapted(plain("int8", "linear"))[0]
            with pytest.raises(IncompatibleError, match="stays packed"):
                layer.merge(safe_merge=safe)


def test_a_class_called_makes_a_layer_of_floats() -> None:
    made = type(plain("int8", "conv"))(4, 8, 3, bias=False)  # type: ignore[call-arg]
    assert type(made) is nn.Conv2d and made.weight.shape == (8, 4, 3, 3)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(64, 48), nn.Conv1d(32, 16, 3, dilation=2), nn.Conv2d(32, 16, 3, padding=1, stride=2),
        nn.Conv2d(32, 16, 3, padding="same"), nn.Conv2d(32, 16, 3, padding=1, padding_mode="circular", groups=2),
        nn.Conv3d(32, 16, 3, bias=False),
    ],
    ids=["linear", "conv1d", "strided", "same", "circular", "conv3d"],
)  # fmt: skip
def test_gradients_keep_no_weight(layer: nn.Module) -> None:
    model = nn.Sequential(layer)
    sdquant.quantize(model, "int8", runtime="plain", progress=False)
    quantized: Any = model[0]
    exact: Any = float_layer(quantized)
    shape = (5, 64) if isinstance(layer, nn.Linear) else (2, 32, *(7 for _ in layer.kernel_size))  # type: ignore[union-attr]
    made, kept = [], []
    for one in (quantized, exact):
        if one.bias is not None:
            one.bias.requires_grad_().grad = None
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            y = one(x)
        if one is quantized:
            assert not kept
        y.backward(torch.ones_like(y) * y.detach().sign())
        made.append((y.detach(), x.grad, None if one.bias is None else one.bias.grad))
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_model_with_a_lora_is_not_quantized() -> None:
    model = adapted(floats("linear"))
    with pytest.raises(ConflictError, match="a LoRA is attached to"):
        sdquant.quantize(model, "int8", progress=False)

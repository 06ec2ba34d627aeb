"""torch's counter of floating-point operations counts a quantized model's as those of the float model."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sdquant
from sdquant import backends, demo
from sdquant.kernels import flop_counts, scheme_activations
from sdquant.nn import quantized_layer

SCHEMES = (
    ("int8", None), ("int8", "int8"), ("nf4", None), ("q8_0", None), ("qint4", None), ("sdnq-uint4", None),
    ("fp8", "fp8"), ("rules,act_qtype=int8", None),
    ("rules,weight_qtype=float8_e4m3fn,act_qtype=float8_e4m3fn", None),
)  # fmt: skip
LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(256, 64),
    "conv": lambda: nn.Conv2d(64, 32, 3, padding=1, stride=2),
    "same": lambda: nn.Conv2d(64, 32, 3, padding="same"),
    "grouped": lambda: nn.Conv2d(64, 32, 3, groups=2),
}


def counted(model: nn.Module, *given: Any, backward: bool = False) -> int:
    with FlopCounterMode(display=False) as counter:
        out = model(*given)
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("text", "compute", "kind"),
    [
        (*of, kind) for of in SCHEMES for kind in LAYERS if (of[0], kind) != ("sdnq-uint4", "grouped")
    ],  # it has no groups
)
def test_layers(text: str, compute: str | None, kind: str) -> None:
    """With a gradient, too, where no convolution's has to compute its result again."""
    torch.manual_seed(0)
    floats, spec = LAYERS[kind]().bfloat16().requires_grad_(False), backends.parse(text)
    layer = quantized_layer(floats, backends.get(spec.scheme.backend).encode(floats.weight, spec), compute=compute)
    x = torch.randn(3, 80, 256) if kind == "linear" else torch.randn(2, 64, 12, 12)
    x = x.bfloat16()
    assert counted(layer, x) == counted(floats, x) > 0
    if kind in ("linear", "conv"):
        x.requires_grad_(True)
        assert counted(layer, x, backward=True) == counted(floats, x, backward=True) > 0
    if kind == "linear":
        assert counted(layer, x[0, 0]) == counted(floats, x[0, 0]) == 2 * 256 * 64


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("text", ["nf4", "nf4,double_quant", "bnb-int8", "qint8", "qint4", "qfloat8"])
def test_modules_of_libraries(text: str, rows: int) -> None:
    """bitsandbytes' and quanto's own, whose ops had no formulas: nf4, qint8 and qfloat8 counted as nothing."""
    floats, spec = LAYERS["linear"]().bfloat16().requires_grad_(False), backends.parse(text)
    backend = backends.get(spec.scheme.backend)
    layer = backend.to_library(floats, backend.encode(floats.weight, spec), spec)
    x = torch.randn(2, rows, 256).bfloat16()
    assert counted(layer, x) == counted(floats, x) == 2 * 2 * rows * 256 * 64


def test_ops_of_libraries_with_two_results() -> None:
    """On a card bitsandbytes' products in integers have a tensor of outliers beside the result."""
    out = torch.empty(3, 5)
    assert flop_counts._of_product(torch.empty(3, 7), out_val=(out, None)) == 2 * 3 * 5 * 7
    assert flop_counts._of_product(torch.empty(3, 7), torch.empty(5, 7), out_val=out) == 2 * 3 * 5 * 7


def test_the_check_of_a_kernel_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first use, when its product is compared with the backend's own."""
    monkeypatch.setattr(scheme_activations, "_verdicts", {})
    floats, spec = LAYERS["conv"]().bfloat16().requires_grad_(False), backends.parse("rules,act_qtype=int8")
    layer = quantized_layer(floats, backends.get(spec.scheme.backend).encode(floats.weight, spec))
    x = torch.randn(2, 64, 12, 12).bfloat16().requires_grad_(True)
    assert counted(layer, x, backward=True) == counted(floats, x, backward=True)


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_a_model_and_its_modules(scheme: str) -> None:
    path = demo.path("digits-sd") / "unet"
    floats: Any = sdquant.load_model(path, "none", progress=False)
    model: Any = sdquant.load_model(path, scheme, progress=False)
    x, text = torch.randn(1, 4, 8, 8).bfloat16(), torch.randn(1, 8, model.config.cross_attention_dim).bfloat16()
    by_module = []
    for one in (floats, model):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            one(x, 1, text)
        by_module.append({name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()})
    assert by_module[0] == by_module[1] and len(by_module[0]) > 100


def test_a_graph() -> None:
    """An exported one calls our ops without our layers."""
    floats, spec = LAYERS["linear"]().requires_grad_(False), backends.parse("int8")
    layer = quantized_layer(floats, backends.get(spec.scheme.backend).encode(floats.weight, spec))
    x = torch.randn(5, 256)
    assert counted(torch.export.export(layer, (x,)).module(), x) == 2 * 5 * 256 * 64


def test_a_counter_is_no_cost_to_who_has_none() -> None:
    """Calls import none; one that was made before it had the formulas gets them at a layer's first call."""
    code = (
        "import sys, torch; from torch import nn\n"
        "from sdquant import backends; from sdquant.nn import quantized_layer\n"
        "floats = nn.Linear(64, 32).requires_grad_(False)\n"
        "layer = quantized_layer(floats, backends.of_scheme('int8').encode(floats.weight, backends.parse('int8')))\n"
        "layer(torch.randn(2, 64)); before = 'torch.utils.flop_counter' in sys.modules\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "counter = FlopCounterMode(display=False)\n"
        "with counter: layer(torch.randn(2, 64))\n"
        "print(before, counter.get_total_flops())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", str(2 * 2 * 64 * 32)]

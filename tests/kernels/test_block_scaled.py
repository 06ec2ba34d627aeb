"""compute="fp4", and "fp8" of MXFP8: products of blocks of small floats, held to comfy-kitchen's eager quantization,
and the arguments for torch's product on cards that have one.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

import sdquant
from sdquant import backends
from sdquant.backends._blocked_scales import untiled
from sdquant.core import Packed
from sdquant.kernels import block_floats, block_scaled, dispatch
from sdquant.nn import quantized_layer
from sdquant.nn.layer_factory import set_compute

LAYOUTS = {"comfy:nvfp4": "TensorCoreNVFP4Layout", "mxfp8": "TensorCoreMXFP8Layout"}
REAL: Any = F.scaled_mm


def _numbers(*sizes: int, seed: int = 1) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def _layer(scheme: str, rows: int, columns: int, compute: str | None, dtype: torch.dtype = torch.float32) -> Any:
    floats = nn.Linear(columns, rows)
    floats.weight.data, floats.bias.data = _numbers(rows, columns), _numbers(rows, seed=2)
    packed = backends.of_scheme(scheme).encode(floats.weight.data, backends.parse(scheme))
    return quantized_layer(floats, packed, dtype, compute).requires_grad_(False).to(dtype)


def _theirs(scheme: str, layer: Any, x: Tensor) -> Tensor:
    """comfy-kitchen's own: what its eager code makes of the activations, times the weight."""
    quantized = QuantizedTensor.from_float(x, LAYOUTS[scheme])
    return quantized.dequantize() @ layer.dequantize(torch.float32).T + layer.bias


@pytest.mark.parametrize("scheme", LAYOUTS)
@pytest.mark.parametrize(("m", "columns"), [(64, 128), (5, 72), (3, 16)])
def test_activations_are_those_of_comfy_kitchen(scheme: str, m: int, columns: int) -> None:
    x = _numbers(m, columns) * 3
    x[0], x[1, :16] = 0, 1e-6
    block = block_floats.MXFP8 if scheme == "mxfp8" else block_floats.NVFP4
    values, factor = block_scaled.rounded(block, x)
    theirs = QuantizedTensor.from_float(x, LAYOUTS[scheme]).dequantize()
    mine = values if factor is None else values * factor
    assert torch.allclose(mine, theirs, rtol=2e-7, atol=0)  # the factor is multiplied in another order
    zeros, _ = block_scaled.rounded(block, torch.zeros(3, columns))
    assert not zeros.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [256, 80])
def test_products_in_four_bits(columns: int, dtype: torch.dtype) -> None:
    layer = _layer("comfy:nvfp4", 48, columns, "fp4", dtype)
    exact, x = copy.deepcopy(layer), (_numbers(2, 40, columns, seed=3) * 3).to(dtype)
    set_compute(exact, None)
    wanted = _theirs("comfy:nvfp4", layer, x.float().view(80, -1)).view(2, 40, 48)
    with torch.no_grad():
        first = layer(x)
        assert first.dtype == dtype and torch.equal(layer(x), first)
        error = (first.float() - wanted).norm() / wanted.norm()
        assert error <= (1e-6 if dtype == torch.float32 else 1e-2)
        assert (exact(x).float() - wanted).norm() > 0.05 * wanted.norm()
        few = x[:, :31].reshape(-1, columns)[:62]
        assert torch.equal(layer(few), exact(few))  # so few are not rounded
        assert torch.equal(torch.compile(layer, backend="aot_eager")(x), first)
    y = layer(x.requires_grad_())
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("largest", [1e-2, 50000.0, 65504.0])
def test_large_activations_in_float16(largest: float) -> None:
    """As large as float16 has, whose products it has too."""
    floats = nn.Linear(256, 48, bias=False)
    floats.weight.data = _numbers(48, 256) * 1e-3
    packed = backends.of_scheme("comfy:nvfp4").encode(floats.weight.data, backends.parse("comfy:nvfp4"))
    x = _numbers(80, 256, seed=3)
    x = (x * (largest / x.abs().max())).half()
    layer = quantized_layer(floats, packed, torch.float16, "fp4").requires_grad_(False)
    exact = quantized_layer(floats, packed, torch.float16).requires_grad_(False)
    with torch.no_grad():
        got, wanted = layer(x).float(), exact(x).float()
    assert wanted.isfinite().all() and (got - wanted).norm() <= 0.15 * wanted.norm()


def test_other_weights_do_not_change() -> None:
    x = _numbers(70, 256)
    for scheme, compute in (("int8_convrot", "fp4"), ("nf4", "fp4"), ("mxfp8", "fp4"), ("mxfp8", "fp8")):
        layer, exact = (_layer(scheme, 48, 256, how) for how in (compute, None))
        with torch.no_grad():
            assert torch.equal(layer(x), exact(x))


@pytest.mark.parametrize("rows", [True, False])
def test_beside_a_low_rank_branch(rows: bool) -> None:
    """SVDQuant: the smoothed activations are rounded, those of the branch are not."""
    made = backends.of_scheme("comfy:nvfp4").encode(_numbers(48, 256), backends.parse("comfy:nvfp4"))
    parts = {
        **made.parts, "smooth": _numbers(256, seed=4).abs() + 0.5, "down": _numbers(256, 8, seed=5),
        "up": _numbers(48, 8, seed=6), **({"rows": _numbers(48, seed=7)} if rows else {}),
    }  # fmt: skip
    spec = replace(made.spec, scheme=backends.scheme("svdquant_nvfp4"))
    floats = nn.Linear(256, 48)
    layer = quantized_layer(floats, Packed(spec=spec, parts=parts), torch.float32, "fp4").requires_grad_(False)
    x = _numbers(80, 256, seed=3)
    values, factor = block_scaled.rounded(block_floats.NVFP4, x / parts["smooth"])
    assert factor is not None
    wanted = (values * factor) @ backends.get("comfy").decode(made, torch.float32).T
    wanted = wanted * (parts["rows"] if rows else 1) + x @ parts["down"] @ parts["up"].T + floats.bias
    with torch.no_grad():
        assert (layer(x) - wanted).norm() <= 1e-5 * wanted.norm()


def _by_floats(a: Tensor, b: Tensor, **how: Any) -> Tensor:
    """`scaled_mm` of what its arguments stand for."""
    inspect.signature(REAL).bind(a, b, **how)

    def floats(codes: Tensor, scales: list[Tensor]) -> Tensor:
        four = codes.dtype == torch.float4_e2m1fn_x2
        block = 16 if four else 32
        codes = codes.view(torch.uint8) if four else codes
        columns = codes.shape[1] * (2 if four else 1)
        grid = untiled("scales", scales[0], (len(codes), columns // block)).view(scales[0].dtype).float()
        values = codes.float()
        if four:
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
            values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]
        return values * grid.repeat_interleave(block, 1) * (scales[1] if four else 1)

    assert b.stride()[0] == 1  # the weight's rows, turned
    y = floats(a, how["scale_a"]) @ floats(b.t(), how["scale_b"]).T
    return (y if how["bias"] is None else y + how["bias"]).to(how["output_dtype"])


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("m", [64, 77])
@pytest.mark.parametrize(("scheme", "compute"), [("comfy:nvfp4", "fp4"), ("mxfp8", "fp8")])
def test_the_product_of_cards(scheme: str, compute: str, m: int, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", _by_floats)
    monkeypatch.setattr(block_scaled, "sound_way", lambda device, block, dtype: block_scaled.Way(torch.float32, inside))
    layer, x = _layer(scheme, 64, 256, compute), _numbers(m, 256, seed=3) * 3
    with torch.no_grad():
        got, wanted = layer(x), _theirs(scheme, layer, x)
        assert (got - wanted).norm() <= 1e-6 * wanted.norm()
        assert torch.equal(layer(x[None]), got[None])
    for block in (block_floats.NVFP4, block_floats.MXFP8):  # the self-check passes what is right, and nothing else
        of = block_scaled.Way(torch.bfloat16, inside)
        assert block_scaled.fault(of, block, torch.device("cpu")) == ""
        monkeypatch.setattr(F, "scaled_mm", lambda *a, **how: _by_floats(*a, **how) * 1.1)
        assert "wrong" in block_scaled.fault(of, block, torch.device("cpu"))
        monkeypatch.setattr(F, "scaled_mm", _by_floats)


@pytest.mark.parametrize(("scheme", "compute"), [("comfy:nvfp4", "fp4"), ("mxfp8", "fp8")])
def test_torch_takes_the_arguments(scheme: str, compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own check of shapes and dtypes, with tensors that say they are on a card."""
    monkeypatch.setattr(block_scaled, "sound_way", lambda device, block, dtype: block_scaled.Way(torch.bfloat16))

    def item(self: Tensor, key: Any) -> Tensor:
        """Slices without torch's own way to them, which asks the card that is not there."""
        for dimension, one in enumerate(key if isinstance(key, tuple) else (key,)):
            self = torch.ops.aten.slice.Tensor(self, dimension, one.start, one.stop, one.step or 1)
        return self

    monkeypatch.setattr(FakeTensor, "__getitem__", item, raising=False)
    layer = _layer(scheme, 64, 256, compute, torch.bfloat16)
    backend, packed, form = layer._backend, layer.packed, layer._form
    block = block_scaled.block_of(packed, form, compute, torch.bfloat16)
    assert block
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.empty(77, 256, dtype=torch.bfloat16, device="cuda:0")
        parts = {name: torch.empty(t.shape, dtype=t.dtype, device="cuda:0") for name, t in packed.parts.items()}
        moved = type(packed)(spec=packed.spec, parts=parts)
        y = dispatch.linear(backend, moved, form, x, torch.empty(64, dtype=torch.bfloat16, device="cuda:0"), compute)
        assert (y.shape, y.dtype, str(y.device)) == ((77, 64), torch.bfloat16, "cuda:0")


def test_no_card_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert block_scaled.sound_way(torch.device("cpu"), 16, torch.bfloat16) is None
    assert block_scaled.sound_way(torch.device("cuda:6"), 16, torch.bfloat16) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert block_scaled.sound_way(torch.device("cuda:7"), 16, torch.bfloat16) is None


def test_the_plan_says_it(flux: Path) -> None:
    made = sdquant.plan(flux, {"transformer": "comfy:nvfp4"}, compute="fp4")
    (part,) = (one for one in made.components if one.weights)
    assert (part.runtime, part.compute) == ("plain", "fp4") and not made.warnings
    for quant in ("int8", "mxfp8"):
        made = sdquant.plan(flux, {"transformer": quant}, compute="fp4")
        assert all(one.compute is None for one in made.components)
        assert any("no weights are in NVFP4" in line for line in made.warnings)
    pipe = sdquant.load_model(flux, {"transformer": "comfy:nvfp4"}, compute="fp4", progress=False)
    assert any(getattr(m, "compute", None) == "fp4" for m in pipe.transformer.modules())

"""Products in 8-bit floats: by the real `torch._scaled_mm`, which a CPU has too, slowly."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sdquant import backends
from sdquant.core import registry
from sdquant.formats import checkpoint
from sdquant.kernels import fp8_linear
from sdquant.nn import quantized_layer
from sdquant.nn.layer_factory import set_compute

if TYPE_CHECKING:
    from sdquant.nn.quantized_layers import QuantizedLayer

SCHEMES = ("nf4", "fp8", "int8", "int4", "qint8", "qint4", "qfloat8", "sdnq-uint4", "q8_0", "q4_k")
BY_ROW = ("qfloat8",)  # e4m3 with one scale for a row


def layer_in(text: str, module: nn.Module) -> QuantizedLayer:
    spec = backends.parse(text)
    weight: Any = module.weight
    layer = quantized_layer(module, backends.get(spec.scheme.backend).encode(weight.data, spec)).eval()
    set_compute(layer, "fp8")
    return layer


def decibels(got: Tensor, wanted: Tensor) -> float:
    error = (got.double() - wanted.double()).square().sum()
    return float(10 * torch.log10(wanted.double().square().sum() / error))


def by_formula(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes as float64, and scales, of rows."""
    scale = x.float().abs().amax(1, keepdim=True) / 448
    factor = torch.where(scale > 0, torch.tensor(448.0) / x.float().abs().amax(1, keepdim=True), 0.0)
    return (x.float() * factor).to(torch.float8_e4m3fn).double(), scale


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CPU's products were worth it."""
    monkeypatch.setattr(fp8_linear, "pays", lambda packed, form, x: fp8_linear.computes(packed, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_quantized_by_the_formula(dtype: torch.dtype) -> None:
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3] = 0
    x[4] *= 1000
    codes, scale = fp8_linear.quantized_rows(x)
    wanted, scales = by_formula(x)
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(codes.double(), wanted) and torch.equal(scale, scales)
    assert codes.double().abs().amax(1).tolist() == [448.0] * 3 + [0.0] + [448.0] * 5


def test_rows_that_are_not_finite_stay_so(everywhere: None) -> None:
    x = torch.ones(3, 64)
    x[0, 5], x[1, 6] = torch.nan, torch.inf
    with torch.no_grad():
        assert layer_in("nf4", nn.Linear(64, 16))(x).isfinite().all(1).tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", SCHEMES)
def test_a_linear_is_the_product_of_codes(text: str, dtype: torch.dtype, everywhere: None) -> None:
    torch.manual_seed(1)
    module = nn.Linear(256, 48).to(dtype)
    layer = layer_in(text, module)
    assert fp8_linear.direct(layer._form) == (text in BY_ROW)
    x = torch.randn(2, 19, 256).to(dtype)
    with torch.no_grad():
        got = layer(x)
        set_compute(layer, None)
        exact = layer(x)
    assert got.dtype == dtype and got.shape == exact.shape
    a, a_scale = by_formula(x.view(-1, 256))
    b, b_scale = by_formula(layer.dequantize(dtype))
    if text in BY_ROW:
        b, b_scale = layer.dequantize(torch.float32).double(), torch.ones(48, 1)
    wanted = (a * a_scale) @ (b * b_scale).T + module.bias.detach().double()
    assert decibels(got.view(-1, 48), wanted) > (90 if dtype == torch.float32 else 47)
    assert 24 < decibels(got, exact) < 60


GOLDEN = Path(__file__).parents[1] / "backends" / "golden" / "comfy_fp8_e4m3_tensor.safetensors"


def _of_comfyui(tmp_path: Path, **changes: Tensor) -> tuple[QuantizedLayer, dict[str, Tensor]]:
    """comfy-kitchen's layer, twice as high for `_scaled_mm`, read from a file with some other tensors."""
    file = load_file(GOLDEN)
    tensors = {key: value for key, value in file.items() if key.startswith("layer.")} | changes
    for key in ("layer.weight", "layer.bias"):
        tensors[key] = torch.cat([tensors[key], tensors[key]]).contiguous()
    save_file(tensors, tmp_path / "layer.safetensors")
    src = checkpoint.single_file(tmp_path / "layer.safetensors")
    found = src.prequantized["layer.weight"]
    packed = registry.of_scheme("fp8").read(found, (16, 256), tensors.__getitem__)
    module = nn.Linear(256, 16, dtype=torch.bfloat16).requires_grad_(False)
    module.bias.copy_(tensors["layer.bias"])
    layer = quantized_layer(module, packed, torch.bfloat16).eval()
    set_compute(layer, "fp8")
    return layer, file


def test_the_scale_of_inputs_in_a_file(tmp_path: Path, everywhere: None) -> None:
    """As comfy-kitchen has it: the same codes of activations, and their product."""
    layer, file = _of_comfyui(tmp_path)
    scale = layer.spec.details["input_scale"]
    assert scale == file["layer.input_scale"].item()
    codes, scales = fp8_linear._quantized_by(scale, file["golden.input"])
    assert torch.equal(codes.float() * scales, file["golden.input_dequantized"])
    with torch.no_grad():
        got = layer(file["golden.input"]).float()
        wide = layer(file["golden.input"].float())
        many = layer(file["golden.input"] * 1e6)
    wanted = torch.cat([file["golden.output_f32"], file["golden.output_f32"]], dim=1)
    assert decibels(got, wanted) > 47 and decibels(wide, wanted) > 47
    assert many.isfinite().all() and many.abs().max() < 448 * scale * 448 * 256


@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-40, float("nan"), -2.0])
def test_a_scale_of_inputs_that_says_nothing(scale: float, tmp_path: Path, everywhere: None) -> None:
    """Rows get their own, as without one."""
    layer, file = _of_comfyui(tmp_path, **{"layer.input_scale": torch.tensor(scale)})
    assert "input_scale" not in layer.spec.details
    with torch.no_grad():
        got = layer(file["golden.input"]).float()
        set_compute(layer, None)
        assert 30 < decibels(got, layer(file["golden.input"])) < 60


def test_what_it_is_not_for() -> None:
    layer = layer_in("nf4", nn.Linear(64, 48))
    x = torch.randn(300, 64)
    assert fp8_linear.computes(layer.packed, x)
    assert not fp8_linear.pays(layer.packed, layer._form, x)  # a CPU is slower with it
    assert not fp8_linear.computes(layer.packed, x.double())
    assert not fp8_linear.computes(layer_in("nf4", nn.Linear(64, 40)).packed, x)
    conv = layer_in("nf4", nn.Conv2d(64, 48, 3))
    image = torch.randn(1, 64, 8, 8)
    assert not fp8_linear.computes(conv.packed, image)
    with torch.no_grad():
        set_compute(exact := copy.deepcopy(conv), None)
        assert torch.equal(conv(image), exact(image))


def test_a_compiled_layer_computes_alike(everywhere: None) -> None:
    layer, x = layer_in("int4", nn.Linear(128, 64)), torch.randn(32, 128)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), layer(x))


def test_gradients_are_those_of_the_float_weight(everywhere: None) -> None:
    layer = layer_in("int4", nn.Linear(128, 64))
    x, other = (torch.ones(32, 128, requires_grad=True) for _ in range(2))
    layer(x).sum().backward()
    torch.nn.functional.linear(other, layer.dequantize(torch.float32), None).sum().backward()
    assert x.grad is not None and other.grad is not None
    torch.testing.assert_close(x.grad, other.grad)


def test_a_device_without_them_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    fp8_linear.way.cache_clear()
    assert fp8_linear.way(cpu, torch.float32) == fp8_linear.Way(torch.float32)
    fp8_linear.way.cache_clear()

    def refuses(*args: Any) -> Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on devices of capability 8.9")

    monkeypatch.setattr(fp8_linear, "product", refuses)
    with caplog.at_level(logging.WARNING):
        assert fp8_linear.way(cpu, torch.float32) is fp8_linear.way(cpu, torch.float32) is None
    assert [record.message for record in caplog.records] == [
        'compute="fp8" has no effect on cpu: RuntimeError: torch._scaled_mm is only supported on devices of capability '
        "8.9. Products are computed with the float weights."
    ]
    fp8_linear.way.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("missing", "left"),
    [
        ({"out_dtype": torch.float16}, {"dtype": torch.bfloat16}),
        ({"bias": True}, {"inside": False}),
        ({"use_fast_accum": True, "bias": True}, {"inside": False, "fast": False}),
    ],
)
def test_what_a_device_lacks_is_done_apart(
    missing: dict[str, Any], left: dict[str, Any], dtype: torch.dtype, everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of bfloat16 alone, no bias inside, no fast sums."""
    fp8_linear.way.cache_clear()
    real = torch._scaled_mm

    def lacking(*args: Any, **kwargs: Any) -> Tensor:
        for name, value in missing.items():
            if kwargs[name] is not None and (name == "bias" or kwargs[name] == value):
                raise RuntimeError(f"{name} is not supported")
        return real(*args, **kwargs)

    layer, x = layer_in("nf4", nn.Linear(128, 64, dtype=dtype)), torch.randn(40, 128).to(dtype)
    with torch.no_grad():
        whole = layer(x)
        fp8_linear.way.cache_clear()
        monkeypatch.setattr(torch, "_scaled_mm", lacking)
        found = layer(x)
    way = fp8_linear.way(x.device, dtype)
    assert way == fp8_linear.Way(**{"dtype": dtype, **(left if "dtype" not in left or dtype == torch.float16 else {})})
    assert found.dtype == dtype and decibels(found, whole) > 45
    fp8_linear.way.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("text", SCHEMES)
def test_on_a_card(text: str) -> None:
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this card has no products of 8-bit floats")
    assert fp8_linear.way(device, torch.bfloat16) is not None
    torch.manual_seed(1)
    layer = layer_in(text, nn.Linear(512, 256, dtype=torch.bfloat16)).to(device)
    x = torch.randn(1024, 512, dtype=torch.bfloat16, device=device)
    assert fp8_linear.pays(layer.packed, layer._form, x)
    with torch.no_grad():
        got = layer(x)
        set_compute(layer, None)
        assert 24 < decibels(got, layer(x)) < 60

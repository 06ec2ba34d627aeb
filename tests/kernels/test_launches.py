"""How much a layer's product asks of a card: its launches, counted with tensors that say they are on one."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sdquant import backends
from sdquant.core.backend import Packed
from sdquant.core.packed_layout import Geometry
from sdquant.kernels import (
    dispatch,
    exact_or_eight,
    fastest,
    int8_linear,
    int8_reference,
    int_matmul,
    linear_of_integers,
    scheme_activations,
    verdicts,
)
from sdquant.kernels.preparation import prepared
from sdquant.kernels.triton import imports
from sdquant.rules import PtqProvider, QuantizationRule
from sdquant.rules.core import fast_activations

from .card_launches import Count

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def launches(text: str, compute: str | None, m: int, dtype: torch.dtype, names: list[str], most: int = 6) -> list[str]:
    """The kernels and operators of a call, for which memory is asked at most so often."""
    spec = backends.parse(text)
    backend = backends.get(spec.scheme.backend)
    made = backend.encode(torch.randn(512, 512).bfloat16(), spec)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parts = {key: torch.empty(part.shape, dtype=part.dtype, device="cuda:0") for key, part in made.parts.items()}
        packed = Packed(spec=made.spec, parts=parts)
        form = backend.form(packed)
        x = torch.empty(m, 512, dtype=dtype, device="cuda:0")
        bias = torch.empty(512, dtype=dtype, device="cuda:0")
        names.clear()
        with Count() as count:
            y = dispatch.linear(backend, packed, form, x, bias, compute)
        assert count.allocations <= most, count.allocations
        assert (y.shape, y.dtype, str(y.device)) == ((m, 512), dtype, "cuda:0")
    return names + count.names


@pytest.mark.parametrize("m", [1, 40, 100, 4608])
@pytest.mark.parametrize(
    "text",
    ["nf4", "nf4,double_quant", "int8_sym", "int8", "int4", "qint8", "qint4", "bnb-int8", "qfloat8", "fp8", "q8_0",
     "q4_k", "q6_k", "sdnq-int8", "sdnq-uint4", "sdnq-uint3", "comfy:nvfp4", "mxfp8"],
)  # fmt: skip
def test_a_product_with_a_decoded_weight(text: str, m: int, launched: list[str]) -> None:
    """Above a few rows the weight is decoded, and the library multiplies and adds."""
    few, many = {"one_row_kernel", "rows_kernel"}, {"decode_kernel", "addmm"}
    names = launches(text, None, m, torch.bfloat16, launched, most=3)  # two of them tables, kept on a card
    assert len(names) <= 2 and set(names) <= (many if m > 64 else few), names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("text", "by"),
    [
        ("int8_sym", ["product_kernel"]),
        ("int8", ["product_kernel"]),
        ("qint8", ["product_kernel"]),
        ("bnb-int8", ["product_kernel"]),
        ("nf4", ["again_kernel", "product_kernel"]),
        ("int4", ["again_kernel", "product_kernel"]),
        ("q4_k", ["again_kernel", "product_kernel"]),
        ("sdnq-uint4", ["again_kernel", "product_kernel"]),
        ("q8_0", ["again_kernel", "runs_kernel"]),
        ("comfy:nvfp4", ["again_kernel", "product_kernel"]),
        ("mxfp8", ["again_kernel", "runs_kernel"]),
    ],
)
def test_a_product_in_integers(text: str, by: list[str], dtype: torch.dtype, launched: list[str]) -> None:
    assert launches(text, "int8", 4608, dtype, launched) == ["quantize_kernel", *by]


@pytest.mark.parametrize("compute", ["int8", "fp8", ""])
@pytest.mark.parametrize(("text", "stored"), [("int8_convrot", True), ("sdnq-uint4,hadamard=true", False)])
def test_a_rotated_weight(text: str, stored: bool, compute: str, launched: list[str]) -> None:
    names = launches(text, compute, 4608, torch.bfloat16, launched)
    if compute == "int8":
        assert names == ["quantize_kernel", *([] if stored else ["again_kernel"]), "product_kernel"]
    elif compute == "fp8":  # x, and the weight as it is decoded
        assert sorted(names) == ["_scaled_mm", "again_kernel", "quantize_kernel"]
    else:
        assert names == ["rotate_kernel", "decode_kernel", "addmm"]
        assert launches(text, compute, 1, torch.bfloat16, launched) == ["rotate_kernel", "one_row_kernel"]


@pytest.mark.parametrize("text", ["w4a8", "w6a8"])
def test_codes_of_integers(text: str, launched: list[str]) -> None:
    names = launches(text, "int8", 4608, torch.bfloat16, launched)
    assert names == ["expand_kernel", "quantize_kernel", "product_kernel"]
    names = launches(text, None, 4608, torch.bfloat16, launched)
    assert sorted(names) == ["addmm", "expand_kernel", "rotate_kernel"]
    names = launches(text, "fp8", 4608, torch.bfloat16, launched)
    assert sorted(names) == ["_scaled_mm", "expand_kernel", "quantize_kernel", "quantize_kernel"]
    names = launches(text, None, 40, torch.bfloat16, launched)
    assert names == ["expand_kernel", "rotate_kernel", "rows_kernel"]


@pytest.mark.parametrize(("m", "compute", "count"), [(40, None, 3), (4608, None, 3), (4608, "fp8", 4)])
def test_a_layer_of_integers(
    m: int, compute: str | None, count: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is prepared for a layer launches no more."""
    spec = backends.parse("w4a8")
    backend = backends.get(spec.scheme.backend)
    made = backend.encode(torch.randn(512, 512).bfloat16(), spec)
    run = prepared(backend, made, backend.form(made), torch.bfloat16, compute, "weight_")
    assert run is not None
    monkeypatch.setattr(linear_of_integers, "usable_parts", lambda x, own, names: {k: own[v] for k, v in names.items()})
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        own = {
            "weight_" + key: torch.empty(part.shape, dtype=part.dtype, device="cuda:0")
            for key, part in made.parts.items()
        }
        x = torch.empty(m, 512, dtype=torch.bfloat16, device="cuda:0")
        own["bias"] = torch.empty(512, dtype=torch.bfloat16, device="cuda:0")
        with Count() as counted:
            y = run(x, own)
    assert y is not None and (y.shape, y.dtype, str(y.device)) == ((m, 512), torch.bfloat16, "cuda:0")
    assert len(launched + counted.names) == count, (launched, counted.names)


@pytest.mark.parametrize("tile", [None, 128])
@pytest.mark.parametrize(("weight", "unpacked"), [("int8", []), ("int4", ["decode_kernel"])])
@pytest.mark.parametrize("m", [1, 4608])
def test_a_rule_with_quantized_activations(
    weight: str, unpacked: list[str], tile: int | None, m: int, launched: list[str]
) -> None:
    """It was 24 to 32 operators, and 283 with tiles of 128 columns at 3072."""
    rule = QuantizationRule(weight_qtype=weight, act_qtype="int8", tile_size=tile)
    layer: Any = PtqProvider([]).layer(torch.nn.Linear(512, 512, dtype=torch.bfloat16), rule, "a")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parts = {
            key: torch.empty(part.shape, dtype=part.dtype, device="cuda:0") for key, part in layer.packed.parts.items()
        }
        packed = Packed(spec=layer.spec, parts=parts)
        x = torch.empty(m, 512, dtype=torch.bfloat16, device="cuda:0")
        bias = torch.empty(512, dtype=torch.bfloat16, device="cuda:0")
        with Count() as count:
            y = scheme_activations.linear(layer._backend, packed, layer._form, layer._activations, x, bias)
    assert (y.shape, y.dtype, str(y.device)) == ((m, 512), torch.bfloat16, "cuda:0")
    assert launched == [*unpacked, "tiles_kernel", "tiled_product_kernel"] and not count.names


@pytest.mark.parametrize(
    ("weight", "more"), [("int8", []), ("int4", ["decode_kernel"])], ids=["int8", "int4"]
)  # fmt: skip
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_convolution_of_a_rule(weight: str, more: list[str], kernel: int, launched: list[str]) -> None:
    """Its images become codes, whose patches are copied and multiplied: it was 26 operators, some of them products."""
    rule = QuantizationRule(weight_qtype=weight, act_qtype="int8")
    floats = torch.nn.Conv2d(64, 128, kernel, padding=kernel // 2, dtype=torch.bfloat16)
    layer: Any = PtqProvider([]).layer(floats, rule, "a")
    geometry = Geometry(stride=(1, 1), padding=(kernel // 2,) * 2, dilation=(1, 1), groups=1)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parts = {
            key: torch.empty(part.shape, dtype=part.dtype, device="cuda:0") for key, part in layer.packed.parts.items()
        }
        packed = Packed(spec=layer.spec, parts=parts)
        x = torch.empty(2, 64, 32, 32, dtype=torch.bfloat16, device="cuda:0")
        bias = torch.empty(128, dtype=torch.bfloat16, device="cuda:0")
        with Count() as count:
            y = scheme_activations.convolution(
                layer._backend, packed, layer._form, layer._activations, x, bias, geometry
            )
    assert (y.shape, y.dtype, str(y.device)) == ((2, 128, 32, 32), torch.bfloat16, "cuda:0")
    assert launched == ["tiles_kernel", *more, "tiled_product_kernel"]
    assert len(count.names) <= 7, count.names


@pytest.mark.parametrize(
    ("weight", "activations", "by_torch"),
    [("nf4", "int8", ["mm", "add"]), ("float8_e4m3fn", "float8_e4m3fn", ["mm"])],
)
def test_a_rule_whose_codes_are_floats(
    weight: str, activations: str, by_torch: list[str], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations are rounded in one launch, the weight is decoded in another: it was 28 and 20 operators."""
    monkeypatch.setattr(fast_activations, "_right", lambda *of: True)
    rule = QuantizationRule(weight_qtype=weight, act_qtype=activations)
    layer: Any = PtqProvider([]).layer(torch.nn.Linear(512, 512, dtype=torch.bfloat16), rule, "a")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parts = {
            key: torch.empty(part.shape, dtype=part.dtype, device="cuda:0") for key, part in layer.packed.parts.items()
        }
        packed = Packed(spec=layer.spec, parts=parts)
        x = torch.empty(4608, 512, dtype=torch.bfloat16, device="cuda:0")
        bias = torch.empty(512, dtype=torch.bfloat16, device="cuda:0")
        with Count() as count:
            y = scheme_activations.linear(layer._backend, packed, layer._form, layer._activations, x, bias)
    assert (y.shape, y.dtype, str(y.device)) == ((4608, 512), torch.bfloat16, "cuda:0")
    assert launched[:2] == ["numbers_kernel", "decode_kernel"] and count.names == by_torch
    assert launched[2:] == ["scaling_kernel"] * (activations != "int8")


def _rule_on_a_card() -> tuple[Any, Packed]:
    """A layer, and its weight on a card."""
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
    layer: Any = PtqProvider([]).layer(torch.nn.Linear(512, 512, dtype=torch.bfloat16), rule, "a")
    parts = layer.packed.parts
    with FakeTensorMode():
        on_card = {key: torch.empty(part.shape, dtype=part.dtype, device="cuda:0") for key, part in parts.items()}
    return layer, Packed(spec=layer.spec, parts=on_card)


def test_activations_elsewhere_are_left_to_the_backend(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = imports.scheme_kernels
    monkeypatch.setattr(imports, "scheme_kernels", lambda device: kernels(device) if device.type == "cuda" else None)
    layer, packed = _rule_on_a_card()
    with torch.no_grad():
        x = torch.empty(4, 512, dtype=torch.bfloat16)
        monkeypatch.setattr(type(layer._backend), "linear", lambda self, packed, x: x)  # torch's error says it
        assert scheme_activations.linear(layer._backend, packed, layer._form, layer._activations, x, None) is x
    assert not launched


def test_kernels_that_fail_on_a_card_are_left_to_torch(
    launched: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*of: Any) -> bool:
        raise ValueError("no such instruction")

    monkeypatch.setattr(scheme_activations, "_right", fails)
    layer, packed = _rule_on_a_card()
    for _ in range(2):
        of = layer._form, layer._activations, torch.bfloat16
        assert not scheme_activations._by_launches(layer._backend, packed, *of)
    (record,) = caplog.records
    assert "ValueError: no such instruction. Using torch instead" in record.getMessage()


@pytest.mark.parametrize("text", ["svdq-int4", "svdq-nvfp4", "sdnq-uint4,svd=true"])
def test_a_weight_with_a_branch(text: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from sdquant.kernels.triton import bound_branch

    names = launches(text, None, 4608, torch.bfloat16, launched)
    assert names == ["down_kernel", "branch_kernel", "addmm"]
    monkeypatch.setattr(bound_branch, "prefers_other", lambda *of: True)
    assert launches(text, None, 4608, torch.bfloat16, launched) == ["branch_kernel", "addmm"]
    assert launches(text, None, 4608, torch.float16, launched) == ["branch_kernel", "addmm"]


def test_torchs_product_where_it_is_faster(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_reference, "prefers_other", lambda *of: True)
    names = launches("int8_sym", "int8", 4608, torch.bfloat16, launched)
    assert sorted(names) == ["_int_mm", "finish_kernel", "quantize_kernel"]
    assert len(launches("int8", "int8", 4608, torch.bfloat16, launched)) == 4  # and the codes as int8


@pytest.mark.parametrize(
    ("text", "count"), [("qfloat8", 3), ("fp8,packing=float8", 2), ("nf4", 3), ("int8_sym", 3), ("q4_k", 3)]
)
def test_a_product_of_8_bit_floats(text: str, count: int, launched: list[str]) -> None:
    names = launches(text, "fp8", 4608, torch.bfloat16, launched)
    assert "_scaled_mm" in names and len(names) == count, names


@pytest.mark.parametrize("size", [32, 64, 512])
@pytest.mark.parametrize(("text", "again"), [("int8_sym", 0), ("q4_k", 1), ("nf4", 1)])
def test_the_weight_of_a_convolution_is_quantized_once_for_all_images(
    text: str, again: int, size: int, launched: list[str]
) -> None:
    """Two images of 64 x 64 in one product; of 512 x 512 in as many as their patches need, on a card of no size."""
    spec = backends.parse(text)
    backend = backends.get(spec.scheme.backend)
    made = backend.encode(torch.randn(512, 256, 3, 3).bfloat16(), spec)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parts = {key: torch.empty(part.shape, dtype=part.dtype, device="cuda:0") for key, part in made.parts.items()}
        packed = Packed(spec=made.spec, parts=parts)
        x = torch.empty(2, 256, size, size, dtype=torch.bfloat16, device="cuda:0")
        geometry = Geometry(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
        launched.clear()
        y = dispatch.convolve(backend, packed, backend.form(packed), x, None, geometry, "int8")
    assert y.shape == (2, 512, size, size)
    products = launched.count("product_kernel") + launched.count("runs_kernel")
    assert launched.count("again_kernel") == again and launched.count("quantize_kernel") == products
    assert products == 1 if size < 512 else products == 2 * math.ceil(512 / ((1 << 26) // (256 * 9 * 512)))


@pytest.mark.parametrize(("capability", "pays"), [((9, 0), True), ((10, 0), False), ((10, 3), False), ((12, 0), True)])
def test_without_triton_products_in_integers_are_left_where_torchs_are_slow(
    capability: tuple[int, int], pays: bool, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Datacenter Blackwell has no tensor cores for them in torch's kernel; with Triton's both are timed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(imports, "products", lambda device: None)
    device = torch.device("cuda", 0)
    assert int_matmul.beats_floats(device) == pays
    backend = backends.of_scheme("int8_sym")
    made = backend.encode(torch.randn(512, 512).bfloat16(), backends.parse("int8_sym"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = {key: torch.empty(part.shape, dtype=part.dtype, device=device) for key, part in made.parts.items()}
        packed = Packed(spec=made.spec, parts=parts)
        x = torch.empty(4608, 512, dtype=torch.bfloat16, device=device)
        assert int8_linear.pays(packed, backend.form(packed), x, len(x)) == pays


@pytest.mark.parametrize("other_is_faster", [True, False])
def test_what_is_timed_on_datacenter_blackwell_decides(
    other_is_faster: bool, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is told what it shows stands for the card: 13 times slower is torch's product on a GB300."""
    monkeypatch.setenv("SDQUANT_TUNE", "1")
    monkeypatch.setattr(fastest, "_verdicts", {})
    monkeypatch.setattr(verdicts, "known", lambda *of: None)
    monkeypatch.setattr(verdicts, "keep", lambda *of: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    times = iter([1.0, 13.0] if other_is_faster else [13.0, 1.0])  # of torch's product, and of ours
    monkeypatch.setattr(fastest, "gpu_seconds", lambda run, device: next(times))
    monkeypatch.setattr(exact_or_eight, "prefers_other", lambda *of: False)
    for _ in range(2):
        names = launches("int8_sym", "int8", 4608, torch.bfloat16, launched)
        assert ("_int_mm" in names) == other_is_faster and ("product_kernel" in names) != other_is_faster

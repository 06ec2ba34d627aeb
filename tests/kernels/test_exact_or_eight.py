"""Products in 8 bits give way to exact ones where these are measured to be faster: `exact_or_eight`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from sdquant import backends
from sdquant.core import Geometry, Packed
from sdquant.kernels import dispatch, exact_or_eight, fastest, int8_convolution, int8_linear, preparation
from sdquant.kernels.base import EightBit
from sdquant.kernels.int8_reference import coding
from sdquant.kernels.triton import bound_eight, bound_linear
from sdquant.nn import quantized_layer
from sdquant.nn.quantized_layers import PREFIX

from .test_bound_triton import LAUNCHED, _bound, _no_card  # noqa: F401  (a fixture of all tests here)
from .test_launches import launches

BF16, CPU = torch.bfloat16, torch.device("cpu")


@pytest.mark.parametrize("compute", ["int8", "fp8"])
@pytest.mark.parametrize(("text", "exact"), [("mxfp8", 2), ("int8_convrot", 3), ("nf4", 2)])
def test_a_card_computes_exactly_where_that_is_faster(
    text: str,
    exact: int,
    compute: str,
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An H200 took 1.5 to 1.7 of bf16 at 4608 rows for mxfp8 in integers, 1.03 to 1.06 for it in floats."""
    asked: list[Any] = []
    monkeypatch.setattr(exact_or_eight, "prefers_other", lambda *of: bool(asked.append(of)) or True)
    names = launches(text, compute, 4608, BF16, launched)
    assert {"decode_kernel", "addmm"} < {*names, ""} and len(names) == exact
    (_, rows, device, eight, _) = asked[0]
    assert rows == 4608 and device.type == "cuda" and callable(eight)
    monkeypatch.setattr(exact_or_eight, "prefers_other", lambda *of: False)
    assert "addmm" not in launches(text, compute, 4608, BF16, launched)


def test_few_rows_are_not_asked_about(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_or_eight, "prefers_other", lambda *of: pytest.fail("it is exact"))
    launches("nf4", "int8", 100, BF16, launched)
    launches("nf4", None, 4608, BF16, launched)


@pytest.mark.parametrize("exact", [True, False])
def test_a_convolution_on_a_card(
    exact: bool,
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 640 channels an H200 took 4.9 to 7.3 of bf16 in integers, and 1.2 to 1.6 exactly."""
    spec = backends.parse("int8_sym")
    backend = backends.get(spec.scheme.backend)
    made = backend.encode(torch.randn(512, 256, 3, 3).bfloat16(), spec)
    monkeypatch.setattr(exact_or_eight, "prefers_other", lambda *of: exact)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parts = {key: torch.empty(part.shape, dtype=part.dtype, device="cuda:0") for key, part in made.parts.items()}
        packed = Packed(spec=made.spec, parts=parts)
        x = torch.empty(2, 256, 32, 32, dtype=BF16, device="cuda:0")
        how = Geometry(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
        launched.clear()
        y = dispatch.convolve(backend, packed, backend.form(packed), x, None, how, "int8")
    assert y.shape == (2, 512, 32, 32)
    assert launched == (["decode_kernel"] if exact else ["quantize_kernel", "product_kernel"])


def test_a_cpu_measures_nothing_that_changes_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_or_eight, "prefers_other", lambda *of: pytest.fail("it would be measured"))
    torch.manual_seed(0)
    floats = nn.Conv2d(128, 64, 3, padding=1).bfloat16().requires_grad_(False)
    packed = backends.of_scheme("int8_sym").encode(floats.weight.data, backends.parse("int8_sym"))
    quantized_layer(floats, packed, compute="int8")(torch.randn(1, 128, 8, 8).bfloat16())


def test_one_that_is_bound_to_a_layer_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = _bound("nf4", True)
    of = coding(layer.packed, layer._form)
    monkeypatch.setattr(fastest, "_verdicts", {})
    for other in (True, False):
        asked: list[Any] = []

        def prefers(
            kind: Any, rows: int, device: Any, *ways: Any, asked: list[Any] = asked, other: bool = other
        ) -> bool:
            asked.append((kind, rows))
            assert all(way().shape == (40, 64) for way in ways)
            fastest._verdicts[fastest._key(kind, rows, device)] = other
            return other

        monkeypatch.setattr(bound_linear, "prefers_other", prefers)
        monkeypatch.setattr(fastest, "_verdicts", {})
        bound = bound_eight.bind(layer._form, layer.packed.parts, BF16, 16, PREFIX, EightBit(32, of))
        x = torch.ones(40, 512, dtype=BF16)
        for turn in range(3):
            LAUNCHED.clear()
            assert bound(x, layer._parameters) is not None
            names = [name for name, _, _ in LAUNCHED]
            assert turn == 0 or names == (
                ["decode_kernel"] if other else ["quantize_kernel", "again_kernel", "product_kernel"]
            )
        assert [rows for _, rows in asked] == [40] and asked[0][0][:2] == ("bound", "int8")


@pytest.mark.parametrize(("scheme", "kernel"), [("int8_sym", 1), ("nf4", 3)])
def test_the_launches_of_a_convolution_are_bound(
    scheme: str,
    kernel: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two or three, and torch's copy of patches; or decoding and torch's own."""
    floats = nn.Conv2d(64, 32, kernel, padding=kernel // 2, stride=2, dtype=BF16).requires_grad_(False)
    spec = backends.parse(scheme)
    layer: Any = quantized_layer(floats, spec.scheme.codec.encode(floats.weight.data, spec))
    form, packed = layer._backend.form(layer.packed), layer.packed
    eight = EightBit(1, coding(packed, form), timed=False)
    product = bound_eight.bind(form, packed.parts, BF16, 0, PREFIX, eight)
    exact = bound_linear.BoundConvolution(form, packed.parts, BF16, PREFIX, layer.spec.shape, torch.conv2d)
    monkeypatch.setattr(int8_linear, "pays_convolved", lambda *of: True)
    monkeypatch.setattr(fastest, "_verdicts", {})
    bound = int8_convolution.Int8Convolution(packed, form, BF16, exact, product)
    assert all(part.is_meta for part in bound.packed.parts.values())
    steps = ["quantize_kernel", *([] if scheme == "int8_sym" else ["again_kernel"]), "product_kernel"]
    for memory in (torch.contiguous_format, torch.channels_last):
        x = torch.ones(2, 64, 6, 8, dtype=BF16).to(memory_format=memory)
        bound(x, layer), LAUNCHED.clear()
        y = bound(x, layer)
        assert y is not None and y.shape == (2, 32, 3, 4) and y.is_contiguous(memory_format=memory)
        assert [name for name, _, _ in LAUNCHED] == steps
    key = next(key for key in fastest._verdicts if key[1] == (24 - 1).bit_length())  # type: ignore[index]
    fastest._verdicts[key] = True
    LAUNCHED.clear()
    assert bound(x, layer) is not None and [name for name, _, _ in LAUNCHED] == ["decode_kernel"]
    assert bound(x[0], layer) is None and bound(x.float(), layer) is None and bound(x[:0], layer) is None
    layer.padding_mode = "circular"
    assert bound(x, layer) is None


def test_a_convolution_that_cannot_pay_is_the_bound_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those with few channels are."""
    floats = nn.Conv2d(64, 32, 1, dtype=BF16).requires_grad_(False)
    spec = backends.parse("int8_sym")
    layer: Any = quantized_layer(floats, spec.scheme.codec.encode(floats.weight.data, spec))
    form = layer._backend.form(layer.packed)
    monkeypatch.setattr(int8_linear, "pays_convolved", lambda *of: False)
    bound = int8_convolution.Int8Convolution(layer.packed, form, BF16, lambda x, layer: x, None)
    x = torch.ones(2, 64, 6, 8, dtype=BF16)
    assert bound(x, layer) is x


def test_a_layer_on_a_card_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = backends.of_scheme("int8_sym").encode(torch.randn(512, 256, 3, 3).bfloat16(), backends.parse("int8_sym"))
    codec, seen = packed.spec.scheme.codec, []

    class Reader:
        def prepared_convolution(self, *of: Any) -> str:
            return "exact"

        def prepared(self, form: Any, parts: Any, dtype: Any, few: int, prefix: str, eight: EightBit) -> str:
            seen.append((few, eight.least, eight.timed))
            return "product"

    of = coding(packed, codec.form(packed))
    monkeypatch.setattr(type(packed), "device", torch.device("cuda", 0))
    monkeypatch.setattr(dispatch, "way", lambda *of: dispatch.Way(reader=Reader()))  # type: ignore[arg-type]
    monkeypatch.setattr(int8_linear, "prepared", lambda *given: EightBit(32, of))
    made: Any = preparation.prepared_convolution(codec, packed, codec.form(packed), BF16, "int8", PREFIX)
    assert (made.exact, made.product, seen) == ("exact", "product", [(0, 1, False)])
    made = preparation.prepared_convolution(codec, packed, codec.form(packed), BF16, None, PREFIX)
    assert made == "exact"

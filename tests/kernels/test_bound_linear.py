"""A layer's prepared products are those of the way that looks everything up, and are used only where they are right."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sdquant import backends
from sdquant.kernels import int8_linear
from sdquant.kernels.cpu import extension
from sdquant.kernels.cpu.bound_linear import Few, Integers
from sdquant.kernels.cpu.int8 import sizes as sizes_of
from sdquant.nn import QuantizedLayer, quantized_layer
from sdquant.nn.layer_factory import set_compute

from .test_packed_layout import SPECS

if extension() is None:
    pytest.skip("the C extension is not built", allow_module_level=True)

COLUMNS, ROWS = 384, 48
PLAIN = (*SPECS, "q8_0", "q4_k", "iq4_xs")


def made(text: str, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> QuantizedLayer:
    spec = backends.parse(text)
    columns = 512 if text in ("q4_k", "iq4_xs", "q8_0", "sdnq-int8") else COLUMNS
    torch.manual_seed(3)
    floats = nn.Linear(columns, ROWS, bias=bias, dtype=dtype)
    packed = backends.get(spec.scheme.backend).encode(floats.weight.data, spec)
    return quantized_layer(floats.requires_grad_(False), packed).eval()


def inputs(layer: QuantizedLayer, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, layer.spec.shape[1], generator=torch.Generator().manual_seed(4)).to(dtype)


def looked_up(layer: QuantizedLayer, x: Tensor) -> Tensor:
    """What the layer gives without what is prepared."""
    return layer._linear(x, layer._bias(x))  # type: ignore[attr-defined, no-any-return]


def served(layer: QuantizedLayer, x: Tensor) -> Tensor | None:
    prepared = layer._prepared
    assert prepared is not None
    return prepared(x, layer._parameters)


@pytest.mark.parametrize("text", PLAIN)
def test_they_are_the_same_bits(text: str) -> None:
    for bias in (True, False):
        layer = made(text, bias)
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            if bias:
                layer.to(dtype)
            for sizes in ((1,), (2, 3), ()):
                x = inputs(layer, *sizes, dtype=dtype)
                first, again = layer(x), layer(x)
                if layer._prepared is None:  # no kernel multiplies few rows of this dtype here
                    continue
                prepared = served(layer, x)
                assert prepared is not None
                assert torch.equal(first, again) and torch.equal(again, prepared) and prepared.shape == first.shape
                assert torch.equal(prepared, looked_up(layer, x))
    layer = made(text)
    layer(inputs(layer, 1))
    assert layer._prepared is not None


OTHERS: dict[str, Callable[[QuantizedLayer, Tensor], Tensor]] = {
    "another dtype": lambda layer, x: x.float(),
    "a gradient": lambda layer, x: x.requires_grad_(),
    "not contiguous": lambda layer, x: torch.stack([x, x], -1)[..., 0],
    "more rows": lambda layer, x: x.repeat(1 + layer._prepared.most // x.numel(), 1),  # type: ignore[union-attr]
    "none": lambda layer, x: x[:0],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_inputs_are_left_to_the_other_way(name: str) -> None:
    layer = made("nf4")
    x = inputs(layer, 3)
    layer(x)
    other = OTHERS[name](layer, x)
    assert served(layer, other) is None
    y = layer(other)
    assert torch.equal(y, looked_up(layer, other)) and y.requires_grad == other.requires_grad


def test_a_wrong_width_is_an_error() -> None:
    layer = made("nf4")
    x = inputs(layer, 2)
    layer(x)
    assert served(layer, x.view(4, -1)) is None
    for wrong in (x.view(4, -1), x[0, 0]):
        with pytest.raises(RuntimeError):
            layer(wrong)


def test_autocast_decides_the_dtype() -> None:
    layer = made("nf4", dtype=torch.float32)
    x = inputs(layer, 3, dtype=torch.float32)
    assert layer(x).dtype == torch.float32 and layer._prepared is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_parts_may_be_replaced_and_moved() -> None:
    layer, other = made("int4"), made("int4")
    x = inputs(layer, 1)
    before = layer(x)
    layer.set_part("scale", other.packed.parts["scale"] * 2)
    twice = layer(x)
    assert served(layer, x) is not None and torch.equal(twice, looked_up(layer, x)) and not torch.equal(twice, before)
    layer.set_part("scale", other.packed.parts["scale"].float())  # another dtype than the kernel was prepared for
    assert served(layer, x) is None and torch.equal(layer(x), before)
    layer.to("meta")
    assert served(layer, x) is None


def test_integers_have_their_rows() -> None:
    layer = made("int8_sym")
    few, many = inputs(layer, 1), inputs(layer, 40)
    layer(few)
    assert served(layer, few) is not None
    set_compute(layer, "int8")
    assert layer._prepared is None
    exact, integers = layer(few), layer(many)
    assert served(layer, few) is not None and (served(layer, many) is not None) == (sizes_of(64) is not None)
    set_compute(layer, None)
    assert torch.equal(layer(few), exact) and not torch.equal(layer(many), integers)


@pytest.mark.skipif(sizes_of(64) is None, reason="no C kernels for integers on this processor")
@pytest.mark.parametrize("text", ["int8", "int8_sym", "qint8", "sdnq-int8", "q8_0", "nf4", "q4_k", "int4"])
def test_integers_are_the_same_bits(text: str) -> None:
    for bias, dtype in ((True, torch.bfloat16), (False, torch.float32), (True, torch.float16)):
        layer = made(text, bias, dtype)
        set_compute(layer, "int8")
        for count in (300, 200, 1000):  # the first is what it is prepared for
            x = inputs(layer, 2, count, dtype=dtype)
            first, again = layer(x), layer(x)
            prepared = served(layer, x)
            assert isinstance(layer._prepared, Integers) and prepared is not None
            assert torch.equal(first, again) and torch.equal(again, prepared) and prepared.shape == first.shape
            assert torch.equal(prepared, looked_up(layer, x))
        assert served(layer, inputs(layer, 300, dtype=torch.float64)) is None
        assert served(layer, inputs(layer, 0, dtype=dtype)) is None
        layer.set_part(layer.part_names[0], layer.packed.parts[layer.part_names[0]].clone())
        assert torch.equal(layer(x), first)
        layer.to("meta")
        assert served(layer, x) is None


@pytest.mark.parametrize("compute", [None, "int8"])
@pytest.mark.parametrize("text", ["int8_sym", "sdnq-int8", "q8_0"])
def test_what_does_not_fit_never_reaches_the_kernels(text: str, compute: str | None) -> None:
    """They would read memory that is not theirs."""
    layer = made(text)
    set_compute(layer, compute)
    columns = layer.spec.shape[1]
    for count in (1, 300):
        layer(inputs(layer, count))
        for sizes in ((count, columns // 2), (3 * count * columns,), (count, 2 * columns), ()):
            with pytest.raises(RuntimeError, match=r"size|shape|dimension|1D|2D"):
                layer(torch.zeros(sizes, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match="on the same device, but the input is on meta"):
            looked_up(layer, inputs(layer, count).to("meta"))
    spec = backends.parse("int8_sym")
    floats = nn.Conv2d(128, 64, 3)
    conv = quantized_layer(floats, backends.get("nncf").encode(floats.weight.data, spec)).eval()
    set_compute(conv, compute)
    with torch.no_grad():
        conv(torch.zeros(1, 128, 9, 9))
        for size in (3, 40):
            for channels in (64, 256):
                with pytest.raises(RuntimeError, match="channels"):
                    conv(torch.zeros(1, channels, size, size))


def test_integers_that_are_wrong_are_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = made("int8_sym"), inputs(made("int8_sym"), 300)
    set_compute(layer, "int8")
    monkeypatch.setattr(int8_linear, "_by_c", lambda *args: False)
    y = layer(x)
    assert served(layer, x) is None and torch.equal(layer(x), y)


def test_copies_and_pickles_work() -> None:
    layer = made("qint4")
    x = inputs(layer, 1)
    y = layer(x)
    assert isinstance(layer._prepared, Few)
    twin = copy.deepcopy(layer)
    twin.set_part("scale", twin.packed.parts["scale"] * 2)
    assert torch.equal(layer(x), y) and not torch.equal(twin(x), y)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded._prepared is None and torch.equal(loaded(x), y)
    assert torch.equal(loaded(x), y) and served(loaded, x) is not None and served(twin, x) is not None


@pytest.mark.parametrize(
    "text", ["int8", "nf4", "q8_0", "rules,act_qtype=int8", "rules,weight_qtype=nf4,act_qtype=int8"]
)
@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 32), lambda: nn.Conv2d(64, 32, 1)], ids=["linear", "conv"])
def test_a_bias_learns_where_the_input_asks_for_no_gradient(text: str, make: Callable[[], nn.Module]) -> None:
    module = make()
    spec = backends.parse(text)
    packed = backends.get(spec.scheme.backend).encode(module.get_parameter("weight").data, spec)
    layer = quantized_layer(module, packed)
    x = torch.randn(3, 64) if isinstance(module, nn.Linear) else torch.randn(3, 64, 4, 4)
    with torch.no_grad():
        wanted = layer(x)  # what is prepared is so now
    bias = layer.get_parameter("bias").requires_grad_()
    y = layer(x)
    torch.testing.assert_close(y.detach(), wanted)
    y.sum().backward()
    assert bias.grad is not None and torch.equal(bias.grad, torch.full((32,), float(y.numel() // 32)))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_parts_that_are_assigned_in_another_dtype_are_looked_at_again(scheme: str) -> None:
    spec = backends.parse(scheme)
    floats = nn.Linear(256, 64).requires_grad_(False)
    layer = quantized_layer(floats, spec.scheme.codec.encode(floats.weight.data, spec))
    x = torch.randn(2, 256)
    wanted, state = layer(x), layer.state_dict()
    state["packed_codes"] = state["packed_codes"].int()
    layer.load_state_dict(state, assign=True)
    torch.testing.assert_close(layer(x), wanted)

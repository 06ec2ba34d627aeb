"""Rules with products of floats, bound to a layer: the launches are those of Triton, and so are the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from sdquant.core.backend import Packed
from sdquant.kernels import scheme_activations
from sdquant.kernels.triton import bound_floats, bound_linear, scheme_scaling
from sdquant.nn.quantized_layers import PREFIX
from sdquant.rules import PtqProvider, QuantizationRule
from sdquant.rules.core import fast_activations

from ..ptx import driver
from .card_launches import Count
from .test_bound_triton import KERNELS, LAUNCHED, _no_card, _same

if TYPE_CHECKING:
    from sdquant.core import FloatRounding

RULES = (("float8_e4m3fn", "float8_e4m3fn"), ("int8", "float8_e4m3fn"), ("nf4", "int8"))
FEW, COLUMNS, ROWS = 16, 512, 64
no_card = _no_card
# Addresses of what each call makes anew; of a bias that there is none of, that of another.
FRESH = {
    "numbers_kernel": ("out", "scale"),
    "scaling_kernel": ("y", "out", "row_scale"),
    "rows_kernel": ("x", "out", "bias"),
    "decode_kernel": ("out",),
}


def layer_of(rule: tuple[str, str], dtype: torch.dtype, bias: bool) -> tuple[Any, FloatRounding]:
    floats = nn.Linear(COLUMNS, ROWS, bias=bias, dtype=dtype)
    layer: Any = PtqProvider([]).layer(floats, QuantizationRule(weight_qtype=rule[0], act_qtype=rule[1]), "a")
    how = layer._backend.float_rounding(layer.packed, dtype)
    assert how is not None and how.decoded == (rule[0] == "nf4")
    return layer.requires_grad_(False), how


def bound_to(layer: Any, how: FloatRounding, dtype: torch.dtype) -> bound_floats.BoundFloats:
    return bound_floats.BoundFloats(layer._form, layer.packed.parts, dtype, how, PREFIX, FEW, 0)


class TestOfTriton:
    pytestmark = pytest.mark.usefixtures("no_card")

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("rows", [7, 40])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("rule", RULES, ids=str)
    def test_the_launches(self, rule: tuple[str, str], dtype: torch.dtype, rows: int, bias: bool) -> None:
        layer, how = layer_of(rule, dtype, bias)
        bound, x = bound_to(layer, how, dtype), torch.ones(1, rows, COLUMNS, dtype=dtype)
        kept = [bound(x, layer._parameters) for _ in range(3)]
        assert all(y is not None and y.shape == (1, rows, ROWS) and y.dtype == dtype for y in kept)
        names = ["numbers_kernel", "rows_kernel" if rows <= FEW else "decode_kernel"]
        names += [] if how.decoded else ["scaling_kernel"]
        assert [name for name, _, _ in LAUNCHED] == names * 3
        kernels = {kernel.fn.__name__: kernel for kernel in KERNELS}
        for at, name in enumerate(names):
            for turn in (1, 2):
                _same(
                    LAUNCHED[at],
                    LAUNCHED[turn * len(names) + at],
                    kernels[name],
                    FRESH[name] + (() if bias else ("bias",)),
                )
        given = [dict(zip(kernels[name].arg_names, values, strict=True)) for name, _, values in LAUNCHED[-len(names) :]]
        if rows <= FEW:
            assert given[1]["x"] == given[0]["out"]
        assert given[1]["codes"] == layer.packed.parts[layer._form.codes].data_ptr()
        if not how.decoded:
            assert given[2]["row_scale"] == given[0]["scale"]
            assert given[2]["scale"] == layer.packed.parts[layer._form.scale].data_ptr()
            assert given[2]["out"] == kept[-1].data_ptr()  # type: ignore[union-attr]
            assert not bias or given[2]["bias"] == layer.bias.data_ptr()

    def test_other_activations_are_left(self) -> None:
        layer, how = layer_of(RULES[0], torch.bfloat16, True)
        bound = bound_to(layer, how, torch.bfloat16)
        assert bound(torch.ones(3, COLUMNS, dtype=torch.float16), layer._parameters) is None
        assert bound(torch.ones(0, COLUMNS, dtype=torch.bfloat16), layer._parameters) is None
        assert bound(torch.ones(COLUMNS, 3, dtype=torch.bfloat16).t(), layer._parameters) is None
        assert LAUNCHED == []


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, compiled_kernels: Path) -> Iterator[None]:
    monkeypatch.setattr(bound_linear, "current_index", lambda x: x.get_device())
    with driver.use():
        yield


@pytest.mark.parametrize(
    ("rule", "dtype"), [(RULES[0], torch.bfloat16), (RULES[1], torch.float16), (RULES[2], torch.bfloat16)], ids=str
)
@pytest.mark.usefixtures("compiled")
def test_the_numbers_of_compiled_code(rule: tuple[str, str], dtype: torch.dtype) -> None:
    """Twice by Triton's own launch and bound, against the same steps in torch."""
    layer, how = layer_of(rule, dtype, True)
    bound = bound_to(layer, how, dtype)
    x = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    operands = layer._backend.as_floats(layer.packed, x)
    if how.decoded:
        wanted = nn.functional.linear(operands.x, layer._backend.decode(layer.packed, dtype)) + layer.bias
    else:
        codes = layer.packed.parts[layer._form.codes].to(operands.x.dtype)
        y = nn.functional.linear(operands.x, codes)
        wanted = scheme_scaling.by_torch(y, *(scale.view(-1) for scale in operands.scales), layer.bias, dtype)
    for _ in range(2):
        found = bound(x, layer._parameters)
        assert found is not None and torch.equal(found, wanted)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_few_launches(rule: tuple[str, str], launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_activations, "_right", lambda *of: True)
    layer, _ = layer_of(rule, torch.bfloat16, True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parts = {
            key: torch.empty(part.shape, dtype=part.dtype, device="cuda:0") for key, part in layer.packed.parts.items()
        }
        bias = torch.empty(ROWS, dtype=torch.bfloat16, device="cuda:0")
        own = {**{PREFIX + key: part for key, part in parts.items()}, "bias": bias}
        packed = Packed(spec=layer.spec, parts=parts)
        run = scheme_activations.prepared_floats(layer._backend, packed, layer._form, torch.bfloat16, PREFIX)
        assert run is not None
        for rows in (1, 77, 4608):
            x = torch.empty(rows, COLUMNS, dtype=torch.bfloat16, device="cuda:0")
            for _ in range(2):
                launched.clear()
                with Count() as count:
                    y = run(x, own)
                assert y is not None and y.shape == (rows, ROWS)
                assert len(launched) + len(count.names) <= 4, launched + count.names

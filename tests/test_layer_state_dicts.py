"""A quantized layer takes the state dict of another layer of its scheme, whatever weights that one was made of."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import sdquant
from sdquant import backends
from sdquant.core import Packed
from sdquant.errors import IncompatibleError, SettingsError
from sdquant.nn import quantized, quantized_layer

from .kernels.test_packed_layout import SPECS

if TYPE_CHECKING:
    from sdquant.nn import QuantizedLayer

NESTED = ("nf4,double_quant", "fp4,double_quant")
GGUF = ("q8_0", "q4_k", "f16")


def made(text: str, seed: int, middle: float = 0.0, device: str = "cpu") -> QuantizedLayer:
    """A layer with few rows prepared, of weights around `middle`."""
    spec = backends.parse(text)
    torch.manual_seed(seed)
    floats = nn.Linear(512, 64).bfloat16().requires_grad_(False)
    weight = (torch.randn(64, 512) * (1 + seed) + middle).bfloat16()
    layer = quantized_layer(floats, backends.of_scheme(spec.scheme.name).encode(weight, spec))
    with torch.no_grad():
        layer(torch.randn(1, 512).bfloat16())
    return layer.to(device)


def products(layer: QuantizedLayer) -> list[Tensor]:
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(7)).bfloat16()
    with torch.no_grad():
        return [layer(x[:1]), layer(x), layer.dequantize()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("text", dict.fromkeys([*SPECS, *NESTED, *GGUF]))
def test_of_other_weights(text: str, assign: bool) -> None:
    target, source = made(text, 0), made(text, 1, middle=3.0)
    wanted = products(source)
    assert not same(products(target), wanted)
    saved = io.BytesIO()
    torch.save(source.state_dict(), saved)
    saved.seek(0)
    before = list(target.parameters())
    target.load_state_dict(torch.load(saved, weights_only=True), assign=assign)
    assert same(products(target), wanted)
    assert same(products(copy.deepcopy(target)), wanted)
    assert assign or all(one is other for one, other in zip(before, target.parameters(), strict=True))


@pytest.mark.parametrize("text", NESTED)
def test_the_offset_is_of_the_state(text: str) -> None:
    layer = made(text, 0)
    state = layer.state_dict()
    assert set(state) == {"bias", *(f"packed_{name}" for name in (*layer.part_names, "offset"))}
    assert state["packed_offset"].item() == layer.spec.details["offset"]
    assert "packed_offset" not in made(text.partition(",")[0], 0).state_dict()
    assert "packed_offset" not in dict(layer.named_parameters())


@pytest.mark.parametrize("text", NESTED)
def test_into_an_empty_layer(text: str) -> None:
    source = made(text, 1)
    target = made(text, 0, device="meta")
    target.load_state_dict(source.state_dict(), assign=True)
    assert same(products(target), products(source))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("text", NESTED)
def test_parts_without_their_offset_are_refused(text: str, strict: bool) -> None:
    target, state = made(text, 0), dict(made(text, 1, middle=3.0).state_dict())
    before = target.spec
    del state["packed_offset"]
    with pytest.raises(RuntimeError, match=r"packed_offset: expected the offset .*, one float32, but there is none"):
        target.load_state_dict(state, strict=strict)
    for wrong in (torch.zeros(2), torch.zeros((), dtype=torch.uint8), torch.zeros((), device="meta"), "0.5"):
        with pytest.raises(RuntimeError, match=r"packed_offset: expected the offset .*, one float32, but it is"):
            target.load_state_dict(state | {"packed_offset": wrong}, strict=strict)
    assert target.spec == before
    target.load_state_dict({"bias": state["bias"]}, strict=False)  # no part of the weight is in it


def test_in_a_model_under_any_name() -> None:
    text = NESTED[0]
    target = nn.ModuleDict({"a": nn.Sequential(made(text, 0), made("nf4", 2)), "b": made(text, 3)})
    source = nn.ModuleDict({"a": nn.Sequential(made(text, 4), made("nf4", 5)), "b": made(text, 6)})
    target.load_state_dict(source.state_dict())
    for name in ("a.0", "a.1", "b"):
        assert same(products(target.get_submodule(name)), products(source.get_submodule(name)))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [*NESTED, "nf4"])
def test_in_a_compiled_model(text: str) -> None:
    torch.compiler.reset()
    target, source = made(text, 0), made(text, 1, middle=3.0)
    compiled = torch.compile(target, backend="aot_eager", fullgraph=True)
    x = torch.randn(40, 512).bfloat16()
    with torch.no_grad():
        before = compiled(x)
        target.load_state_dict(source.state_dict())
        assert torch.equal(compiled(x), source(x)) and not torch.equal(before, source(x))
    torch.compiler.reset()


def _with_columns(factor: float) -> QuantizedLayer:
    """NVFP4 with `pre_quant_scale`, which no weight has that is made here."""
    layer = made("comfy:nvfp4", 0)
    packed = layer.packed
    columns = torch.full((512,), factor)
    floats = nn.Linear(512, 64).bfloat16().requires_grad_(False)
    return quantized_layer(floats, Packed(spec=packed.spec, parts={**packed.parts, "columns": columns}))


def _with_one_scale(text: str) -> QuantizedLayer:
    """ComfyUI's layers with one scale for all rows, in schemes that are made here with a scale for each."""
    layer = made(text, 0)
    packed = layer.packed
    parts = {**packed.parts, "scale": packed.parts["scale"].amax().reshape(() if text == "int8_convrot" else (1, 1))}
    return quantized_layer(nn.Linear(512, 64).bfloat16(), Packed(spec=packed.spec, parts=parts))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "layer",
    [lambda: _with_columns(2.0), lambda: _with_one_scale("int8_convrot"),
     lambda: _with_one_scale("fp8,packing=float8"), lambda: made("q4_k", 0)],
    ids=["columns", "convrot", "fp8", "q4_k"],
)  # fmt: skip
def test_floats_that_cannot_become_such_a_weight_change_nothing(layer: Any, strict: bool) -> None:
    """Else old factors of columns, or a scale of the old weight, are mixed with new codes."""
    target = layer()
    with torch.no_grad():
        before, spec = products(target), target.spec
    floats = {"weight": torch.randn(64, 512).bfloat16(), "bias": target.bias.detach().clone()}
    with pytest.raises(RuntimeError, match=r"weight: cannot quantize it to .* as this layer's weight is"):
        target.load_state_dict(floats, strict=strict)
    assert target.spec == spec and same(products(target), before)
    with pytest.raises((SettingsError, IncompatibleError)):
        target.weight = floats["weight"]
    assert target.spec == spec and same(products(target), before)


TWINS = [("int8_row", "int8_convrot"), ("int8_convrot", "int8_row"), ("nf4", "fp4"), ("q4_0", "iq4_nl")]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("one", "other"), TWINS)
def test_parts_that_mean_something_else_are_refused(one: str, other: str, strict: bool) -> None:
    """Without its model a state dict still tells: both have parts of the same names and shapes."""
    target, state = made(one, 0), io.BytesIO()
    torch.save(made(other, 1).state_dict(), state)
    state.seek(0)
    with pytest.raises(RuntimeError, match=r"(rotated in groups|was saved as)"):
        target.load_state_dict(torch.load(state, weights_only=True), strict=strict)


@pytest.mark.parametrize(("one", "other"), TWINS[:2])
def test_the_rotation_is_among_the_tensors(one: str, other: str) -> None:
    """Also of a state dict that was written as safetensors, which has no metadata for layers."""
    with pytest.raises(RuntimeError, match=r"packed_rotation: the weight .* rotated"):
        made(one, 0).load_state_dict(dict(made(other, 1).state_dict()), strict=False)
    source, target = made(other, 1), made(other, 0)
    target.load_state_dict(dict(source.state_dict()))
    assert same(products(target), products(source))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_floats_of_another_dtype_than_the_scales(dtype: torch.dtype) -> None:
    """Scales of rules have the dtype of the weight."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    net = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
    sdquant.quantize(net, "rules,weight_qtype=int8", progress=False)
    net.load_state_dict({"0.weight": weight.to(dtype)})
    (packed,) = (packed for _, packed in quantized(net))
    assert (packed.spec.scheme.codec.decode(packed, torch.float32) - weight).norm() < 0.02 * weight.norm()


def test_parameters_alone_do_not_say_whether_they_are_rotated() -> None:
    net = nn.Sequential(nn.Linear(64, 64))
    sdquant.quantize(net, "int8_convrot", progress=False)
    with pytest.raises(RuntimeError, match=r"may not be rotated.*state_dict\(\)"):
        net.load_state_dict(dict(net.named_parameters()))
    net.load_state_dict(net.state_dict())

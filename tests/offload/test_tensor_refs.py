"""What belongs to a module, hidden tensors included, and that another tensor in its place is really used."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sdquant import backends, offload
from sdquant.backends.bnb import BACKEND
from sdquant.nn import quantized_layer
from sdquant.offload.tensor_refs import Slot, TensorReference, bring, slots, with_number

if TYPE_CHECKING:
    from sdquant.core.backend import Packed


def library(name: str, module: nn.Module) -> nn.Module:
    backend = backends.of_scheme(name.partition(",")[0])
    spec = backends.parse(name)
    weight: Any = module.weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, at their import
        return backend.to_library(module, backend.encode(weight.data, spec), spec).eval()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 128)


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {slot.name: tensor for slot in slots(module) if (tensor := slot.get()) is not None}


def move_all(module: nn.Module) -> list[Slot]:
    """Every slot gets a copy of its tensor, and the old memory is spoiled: who still reads it computes nonsense."""
    found = list(slots(module))
    for slot in found:
        old = slot.get()
        assert old is not None
        if slot.opaque:
            slot.put(old.to("cpu", copy=True))
        else:
            slot.put(old.clone())
            old.view(-1).view(torch.uint8).fill_(0x55) if old.dim() else old.fill_(1e9)
    return found


def test_parameters_and_buffers_persistent_or_not() -> None:
    module = nn.Module()
    module.layer = nn.Linear(4, 3)
    module.register_buffer("kept", torch.ones(5))
    module.register_buffer("left_out_of_files", torch.ones(7, dtype=torch.int8), persistent=False)
    module.register_buffer("empty", None)
    assert set(tensors(module)) == {"layer.weight", "layer.bias", "kept", "left_out_of_files"}
    assert offload.weight_bytes(module) == 4 * 12 + 4 * 3 + 4 * 5 + 7


def test_tied_weights_are_one_slot_and_move_together() -> None:
    module: Any = nn.ModuleDict({"a": nn.Embedding(10, 4), "b": nn.Linear(4, 10, bias=False)})
    module["b"].weight = module["a"].weight
    (slot,) = slots(module)
    assert len(slot.places) == 2 and offload.weight_bytes(module) == 160
    slot.put(torch.full((10, 4), 3.0))
    assert module["b"].weight is module["a"].weight and module["b"].weight[0, 0] == 3

    # Two parameters over the same memory are tied as well.
    module["b"].weight = nn.Parameter(module["a"].weight.data)
    (slot,) = slots(module)
    slot.put(torch.full((10, 4), 4.0))
    assert module["a"].weight.data_ptr() == module["b"].weight.data_ptr()


def test_weights_on_the_meta_device_are_slots_of_their_own() -> None:
    module = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta"))
    assert len(tensors(module)) == 4 and offload.weight_bytes(module) == 2 * (64 + 16)


@pytest.mark.parametrize("name", ["nf4", "nf4,double_quant", "fp4", "bnb-int8", "qint8", "qint4", "qfloat8"])
class TestLibraries:
    def test_moved_weights_are_the_ones_computed_with(self, name: str) -> None:
        module = library(name, linear())
        x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            for _ in range(3):  # before the first forward, and after it, when libraries have moved things about
                move_all(module)
                first = module(x)
                move_all(module)
                assert torch.equal(module(x), first)
        want = torch.nn.functional.linear(x, linear().weight, linear().bias)
        assert (first - want).norm() / want.norm() < 0.2

    def test_all_bytes_are_counted(self, name: str) -> None:
        module = library(name, linear())
        packed = backends.of_scheme(name.partition(",")[0]).from_library(module)
        assert packed is not None
        # What a scheme's constants and activation scales add is small.
        assert packed.nbytes + 4 * 128 <= offload.weight_bytes(module) <= packed.nbytes + 4 * 128 + 1200


def test_code_tables_are_a_module_s_own() -> None:
    """What spoils one module's tables does not reach those with which others are decoded."""
    module = library("nf4,double_quant", linear())
    before = BACKEND.decode(_doubly_quantized(), torch.float32)
    move_all(module)
    assert torch.equal(BACKEND.decode(_doubly_quantized(), torch.float32), before)


def _doubly_quantized() -> Packed:
    return BACKEND.encode(linear().weight.data, backends.parse("nf4,double_quant"))


def test_the_codes_of_int8_stay_aliases() -> None:
    module: Any = library("bnb-int8", linear())
    for _ in range(2):
        move_all(module)
        aliases = [t for t in (module.weight.CB, module.state.CB) if t is not None]
        assert aliases and all(t.data_ptr() == module.weight.data_ptr() for t in aliases)
        with torch.no_grad():
            module(torch.randn(2, 256))
    assert module.weight.CB is None and module.state.CB is not None


def test_wrapper_tensors_are_opaque_and_stay_what_they_are() -> None:
    module: Any = library("qint8", linear())
    kind = type(module.weight)
    found = {slot.name: slot.opaque for slot in move_all(module)}
    assert found == {"weight": True, "bias": False, "input_scale": False, "output_scale": False}
    assert type(module.weight) is kind and isinstance(module.weight, nn.Parameter)


def test_plain_layers_hide_nothing() -> None:
    backend = backends.of_scheme("int8")
    layer = quantized_layer(linear(), backend.encode(linear().weight.data, backends.parse("int8")))
    assert set(tensors(layer)) == {name for name, _ in layer.named_parameters()}
    assert offload.weight_bytes(layer) == layer.packed.nbytes + 4 * 128
    x = torch.randn(3, 256)
    with torch.no_grad():
        before = layer(x)
        move_all(layer)
        assert torch.equal(layer(x), before)


def test_another_device_of_the_same_kind_is_another_device() -> None:
    """With two cards: a model on the first is brought to the second, and "cuda" is the one in use."""
    with FakeTensorMode():
        box = [torch.empty(4, device="cuda:0")]
        slot = Slot(
            "weight",
            [TensorReference(nn.Identity(), "weight", lambda: box[0], lambda tensor: box.__setitem__(0, tensor))],
        )
        assert bring([slot], torch.device("cuda:0")) == 0
        assert bring([slot], torch.device("cuda:1")) == 1
        assert box[0].device == torch.device("cuda:1")
    assert with_number(torch.device("cpu:0")) == torch.device("cpu")

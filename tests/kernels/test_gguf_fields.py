"""GGUF weights with their fields apart: the bytes, and layers that hold them, against blocks."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import sdquant
from sdquant import backends
from sdquant.backends import _gguf_blocks
from sdquant.backends.gguf import BACKEND
from sdquant.core.gguf_fields import FIELDS, places
from sdquant.core.gguf_types import TYPES
from sdquant.core.packed_rows import cut, join, take
from sdquant.kernels import dispatch, fp32_gemm, libgguf, prepack
from sdquant.kernels.cpu import cpu_kernels as native
from sdquant.kernels.triton import imports
from sdquant.kernels.triton.blocks import GGUF, MOST
from sdquant.kernels.triton.triton_kernels import TritonReader
from sdquant.nn import QuantizedLayer, quantized_layer

if TYPE_CHECKING:
    from sdquant.core.backend import Packed

KINDS = tuple(FIELDS)


def packed_as(kind: str, *shape: int) -> Packed:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(len(kind)))
    return BACKEND.encode(weight.bfloat16(), backends.parse(kind))


def same(one: Packed, other: Packed) -> bool:
    return one.parts.keys() == other.parts.keys() and all(torch.equal(one.parts[k], other.parts[k]) for k in one.parts)


def test_every_type_that_triton_reads_has_its_fields() -> None:
    assert FIELDS.keys() == GGUF.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_fields_are_all_bytes_of_a_block_once(kind: str) -> None:
    taken = sorted(byte for field in FIELDS[kind] for byte in range(field.start, field.start + field.size))
    assert taken == list(range(TYPES[kind].nbytes))


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_weight_that_triton_reads_is_within_32_bits(kind: str) -> None:
    assert TYPES[kind].size(MOST) < 1 << 31


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 7, 64])
def test_bytes_apart_come_together_again(kind: str, count: int) -> None:
    blocks = torch.randint(0, 256, (count, TYPES[kind].nbytes), dtype=torch.uint8)
    fields = _gguf_blocks.apart(kind, blocks)
    assert fields.shape == (blocks.numel(),)
    assert torch.equal(_gguf_blocks.together(kind, fields), blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_are_where_the_places_say(kind: str) -> None:
    count = 24
    blocks = torch.randint(0, 256, (count, TYPES[kind].nbytes), dtype=torch.uint8)
    fields, flat = _gguf_blocks.apart(kind, blocks), blocks.view(-1)
    here, there = places(kind, apart=False), places(kind, apart=True)
    for field in FIELDS[kind]:
        a, b = here[field.name], there[field.name]
        assert count * b.start % 16 == 0  # where a load of 16 bytes can begin
        for block in (0, 5, count - 1):
            wanted = flat[a.start + block * a.step :][: field.size]
            assert torch.equal(fields[count * b.start + block * b.step :][: field.size], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_apart_is_the_same_weight(kind: str) -> None:
    blocks = packed_as(kind, 6, 512)
    fields = BACKEND.for_kernels(blocks)
    assert list(fields.parts) == ["fields"] and fields.nbytes == blocks.nbytes and fields.spec == blocks.spec
    assert BACKEND.for_kernels(fields) is fields and BACKEND.for_files(blocks) is blocks
    assert same(BACKEND.for_files(fields), blocks)
    assert torch.equal(BACKEND.decode(fields, torch.bfloat16), BACKEND.decode(blocks, torch.bfloat16))
    assert BACKEND.sound(fields) and BACKEND.by_row(fields)
    written = BACKEND.write("a.weight", fields)
    assert list(written) == ["a.weight"] and torch.equal(written["a.weight"], blocks.parts["blocks"])


def test_a_scale_that_is_not_finite_is_found_apart() -> None:
    blocks = packed_as("q8_0", 4, 64)
    blocks.parts["blocks"][1, :2] = torch.tensor([0xFF, 0x7F])
    assert not BACKEND.sound(BACKEND.for_kernels(blocks))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_it(kind: str) -> None:
    blocks = packed_as(kind, 8, 512)
    fields, index = BACKEND.for_kernels(blocks), torch.tensor([6, 0, 3])
    assert same(take(fields, index), BACKEND.for_kernels(take(blocks, index)))
    for ranges in ([(2, 5)], [(4, 8), (0, 4)]):
        assert same(cut(fields, ranges), BACKEND.for_kernels(cut(blocks, ranges)))
    whole = join([fields, blocks])
    wanted = join([blocks, blocks])
    assert whole is not None and wanted is not None and same(whole, wanted)


def test_readers_for_cpus_leave_it_alone() -> None:
    for kind in KINDS:
        fields = BACKEND.for_kernels(packed_as(kind, 4, 512))
        form = BACKEND.form(fields)
        assert form is not None and form.apart
        assert not libgguf.Libgguf().reads(form, fields.parts, torch.float32)
        assert not native.Native().reads(form, fields.parts, torch.float32)
        assert dispatch.way(BACKEND, fields, form, torch.bfloat16).reader is None


class TestWanted:
    """Which weights of which devices are laid out so."""

    @pytest.fixture(autouse=True)
    def _triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(imports, "launcher", lambda: object())

    @pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu:0"])
    def test_on_cards_where_blocks_do_not_fit_a_load(self, device: str) -> None:
        for kind in KINDS:
            form = BACKEND.form(packed_as(kind, 4, 512))
            assert form is not None and prepack.wanted(form, device) == (kind not in ("q4_k", "q5_k"))

    @pytest.mark.parametrize("device", ["cpu", "mps", "privateuseone:0"])
    def test_nowhere_else(self, device: str) -> None:
        packed = packed_as("q8_0", 4, 64)
        assert prepack.laid_out(packed, device) is packed

    def test_not_of_other_schemes(self) -> None:
        for scheme in ("nf4", "int8"):
            spec = backends.parse(scheme)
            packed = backends.get(spec.scheme.backend).encode(torch.randn(64, 256), spec)
            assert prepack.laid_out(packed, "cuda") is packed

    def test_not_without_bytes(self) -> None:
        packed = packed_as("q8_0", 4, 64).to(torch.device("meta"))
        assert prepack.laid_out(packed, "cuda") is packed

    def test_not_without_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(imports, "launcher", lambda: None)
        packed = packed_as("q8_0", 4, 64)
        assert prepack.laid_out(packed, "cuda") is packed
        assert not TritonReader().wants_apart(BACKEND.form(packed))  # type: ignore[arg-type]


def layers(module: nn.Module, kind: str) -> tuple[QuantizedLayer, QuantizedLayer]:
    """The same layer with blocks and with fields apart."""
    weight: Any = module.weight
    packed = BACKEND.encode(weight.data, backends.parse(kind))
    return quantized_layer(copy.deepcopy(module), packed), quantized_layer(module, BACKEND.for_kernels(packed))


def linear(kind: str) -> tuple[QuantizedLayer, QuantizedLayer]:
    torch.manual_seed(0)
    return layers(nn.Linear(512, 48, dtype=torch.bfloat16), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", [None, "int8"])
def test_a_linear_layer(kind: str, compute: str | None) -> None:
    blocks, fields = linear(kind)
    for layer in (blocks, fields):
        layer.compute = compute
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(fields.dequantize(), blocks.dequantize())
    with torch.no_grad():
        if compute is None and not fp32_gemm.is_profitable(x.dtype):
            assert torch.equal(fields(x), torch.nn.functional.linear(x, blocks.dequantize(), blocks._bias(x)))
        assert torch.allclose(fields(x), blocks(x), rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("kind", ["q8_0", "q6_k"])
def test_a_convolution(kind: str) -> None:
    torch.manual_seed(0)
    blocks, fields = layers(nn.Conv2d(64, 16, 3, padding=1, dtype=torch.bfloat16), kind)
    x = torch.randn(2, 64, 8, 8).bfloat16()
    with torch.no_grad():
        assert torch.allclose(fields(x), blocks(x), rtol=2**-6, atol=2**-5)


def test_a_gradient() -> None:
    blocks, fields = linear("q6_k")
    x = torch.randn(5, 512).bfloat16()
    found = []
    for layer in (blocks, fields):
        own = x.clone().requires_grad_()
        layer(own).float().sum().backward()  # whose gradient does not depend on the products
        assert own.grad is not None
        found.append(own.grad)
    assert torch.equal(found[0], found[1]) and bool(found[0].any())


@pytest.mark.parametrize("kind", ["q8_0", "q3_k"])
def test_compiled(kind: str) -> None:
    _, fields = linear(kind)
    compiled = torch.compile(fields, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 512).bfloat16()
    with torch.no_grad():
        assert torch.equal(compiled(x), fields(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["q4_0", "q2_k"])
def test_state_dicts_of_one_order_load_into_the_other(kind: str, assign: bool) -> None:
    blocks, fields = linear(kind)
    wanted = blocks.dequantize()
    assert "packed_blocks" in blocks.state_dict() and "packed_fields" in fields.state_dict()
    assert "packed_blocks" not in fields.state_dict()
    for source, target in ((blocks, fields), (fields, blocks), (fields, fields)):
        state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
        for part in (target.packed.parts[name] for name in target.part_names):
            part.zero_()
        assert not torch.equal(target.dequantize(), wanted)
        target.load_state_dict(state, assign=assign)
        assert torch.equal(target.dequantize(), wanted)
        assert len(state) == 2  # the caller's own dict is as it was


def test_a_state_of_another_size_is_refused() -> None:
    _, fields = linear("q8_0")
    other, _ = layers(nn.Linear(256, 48, dtype=torch.bfloat16), "q8_0")
    with pytest.raises(RuntimeError, match="packed_fields"):
        fields.load_state_dict(other.state_dict())


def test_copies_and_moves(tmp_path: Path) -> None:
    blocks, fields = linear("q6_k")
    wanted = blocks.dequantize()
    torch.save(fields, tmp_path / "layer.pt")
    copies = (
        copy.deepcopy(fields), pickle.loads(pickle.dumps(fields)),
        torch.load(tmp_path / "layer.pt", weights_only=False), fields.to("cpu"), fields.to(torch.float16),
    )  # fmt: skip
    for layer in copies:
        assert layer.part_names == ("fields",) and torch.equal(layer.dequantize(torch.bfloat16), wanted)


def test_laying_out_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepack, "wanted", lambda form, device: device == "card")
    blocks, _ = linear("q6_k")
    x, wanted, names = torch.randn(3, 512).bfloat16(), blocks.dequantize(), list(blocks._parameters)
    with torch.no_grad():
        before = blocks(x)  # with what a layer looks up for its next call
        blocks.lay_out("cpu")
        assert blocks.part_names == ("blocks",)
        blocks.lay_out("card")
        assert blocks.part_names == ("fields",) and "packed_blocks" not in blocks._parameters
        assert torch.equal(blocks.dequantize(), wanted)
        assert torch.allclose(blocks(x), before, rtol=2**-6, atol=2**-5)
    assert len(blocks._parameters) == len(names)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("offload", ["none", "model", "balanced"])
def test_a_model_on_a_card(offload: str, saved: Any) -> None:
    path = saved("q6_k") / "unet"
    here = sdquant.load_model(path, device="cpu", progress=False)
    there = sdquant.load_model(path, device="cuda", offload=offload, runtime="plain", progress=False)
    names = [name for name, module in here.named_modules() if isinstance(module, QuantizedLayer)]
    assert names
    for name in names:
        one, other = here.get_submodule(name), there.get_submodule(name)
        assert isinstance(one, QuantizedLayer) and isinstance(other, QuantizedLayer)
        assert other.part_names == ("fields",)
        assert torch.equal(other.dequantize().cpu(), one.dequantize())
    with torch.no_grad():
        sample, words = torch.randn(1, 4, 8, 8).bfloat16(), torch.randn(1, 16, 128).bfloat16()
        wanted = here(sample, 3, words).sample.float()
        found = there(sample.cuda(), 3, words.cuda()).sample.float().cpu()
    assert (found - wanted).norm() < 0.03 * wanted.norm()


def test_tables_of_embeddings_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepack, "wanted", lambda form, device: True)
    table = nn.Embedding(40, 64)
    layer = quantized_layer(table, BACKEND.encode(table.weight.data, backends.parse("q8_0")))
    layer.lay_out("card")
    assert layer.part_names == ("blocks",)

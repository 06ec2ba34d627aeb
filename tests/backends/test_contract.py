"""What every scheme of every backend promises, built-in or not: a new scheme is tested by being in the registry."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from sdquant import backends
from sdquant.core import registry
from sdquant.core.backend import Packed, TensorInfo, Unfit
from sdquant.kernels import dispatch, fp32_gemm
from sdquant.nn import quantized_layer

ROWS = {row.name: row for row in backends.schemes()}
SHAPES = {"linear": (128, 256), "conv": (64, 32, 3, 3), "narrow": (32, 64)}
# Largest relative error of weights from a normal distribution, by nominal bits. What bits can do, with a margin.
ERROR = {16: 0.004, 8: 0.045, 6: 0.06, 5: 0.08, 4: 0.16, 3: 0.36, 2: 0.75, 1: 0.75}
# Three values only, and the largest weight of 256 is the scale of all.
ERROR_OF = {"tq1_0": 0.85, "tq2_0": 0.85}
# Bytes against bf16, by nominal bits: the promise of the README.
BYTES = {16: 1.0, 8: 0.54, 6: 0.42, 5: 0.36, 4: 0.30, 3: 0.22, 2: 0.17, 1: 0.11}
# GGUF's own sizes are a little more in these two: 110 bytes for 256 weights, and 84.
BYTES_OF = {
    "q3_k": 0.2149, "q2_k": 0.1641, "q5_1": 0.375, "q4_1": 0.3125, "f32": 2.0,
    **dict.fromkeys(("svdquant_w4a4", "svdquant_nvfp4"), 0.69),  # so small a weight has a branch of its size
}  # fmt: skip


def _bits(row: backends.Scheme) -> int:
    return 16 if row.bits >= 16 else int(row.bits)


def _weight(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _packed(name: str, kind: str, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, Packed]:
    weight = _weight(SHAPES[kind], dtype)
    spec = backends.parse(name)
    backend = backends.of_scheme(name)
    try:
        backend.layout(spec, SHAPES[kind], str(dtype).removeprefix("torch."))
    except Unfit as reason:
        # A refusal has to come with its reason, and must be the same from `encode`.
        assert str(reason)
        with pytest.raises(Unfit):
            backend.encode(weight, spec)
        pytest.skip(f"{name} does not hold {SHAPES[kind]}: {reason}")
    return weight, backend.encode(weight, spec)


# Their tables are searched through for seconds; iq2_xs and iq3_s are encoded alike.
SEARCHED = ("iq1_m", "iq1_s", "iq2_s")
NAMED = [pytest.param(name, marks=pytest.mark.slow) if name in SEARCHED else name for name in ROWS]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", NAMED)
class TestCodec:
    def test_layout_foretells_encode(self, name: str, kind: str) -> None:
        _, packed = _packed(name, kind)
        layout = backends.of_scheme(name).layout(backends.parse(name), SHAPES[kind], "bfloat16")
        made = {
            part: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for part, tensor in packed.parts.items()
        }
        assert made == {part: (row.dtype, row.shape) for part, row in layout.items()}
        assert packed.nbytes == sum(row.nbytes for row in layout.values())

    def test_error_and_size_are_those_of_the_bits(self, name: str, kind: str) -> None:
        weight, packed = _packed(name, kind)
        back = backends.of_scheme(name).decode(packed, torch.float32)
        assert back.shape == weight.shape and back.dtype == torch.float32
        error = (back - weight.float()).norm() / weight.float().norm()
        assert error < ERROR_OF.get(name, ERROR[_bits(ROWS[name])])
        if kind != "narrow":  # a row of 64 weights carries as many scales as a row of 256
            assert packed.nbytes / (2 * weight.numel()) <= BYTES_OF.get(name, BYTES[_bits(ROWS[name])])

    def test_encode_is_deterministic_and_leaves_its_input_alone(self, name: str, kind: str) -> None:
        weight, packed = _packed(name, kind)
        before = weight.clone()
        again = backends.of_scheme(name).encode(weight, backends.parse(name))
        assert torch.equal(before, weight)
        for part, tensor in packed.parts.items():
            assert torch.equal(_bytes(tensor), _bytes(again.parts[part])), part

    def test_decode_into_is_decode(self, name: str, kind: str) -> None:
        weight, packed = _packed(name, kind)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = torch.full(weight.shape, float("nan"), dtype=dtype)
            backends.of_scheme(name).decode_into(packed, out)
            assert torch.equal(out, backends.of_scheme(name).decode(packed, dtype))

    def test_spec_survives_json(self, name: str, kind: str) -> None:
        _, packed = _packed(name, kind)
        assert registry.packed_spec(json.loads(json.dumps(packed.spec.to_dict()))) == packed.spec

    def test_written_keys_are_found_and_read_back(self, name: str, kind: str) -> None:
        weight, packed = _packed(name, kind)
        backend = backends.of_scheme(name)
        file = backend.write("block.proj.weight", packed)
        assert all(tensor.is_contiguous() for tensor in file.values())
        keys = {part: backend.key("block.proj.weight", part, packed.spec) for part in packed.parts}
        for part, key in keys.items():
            assert torch.equal(_bytes(file[key]), _bytes(packed.parts[part]))
        infos = {
            key: TensorInfo(
                dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape), nbytes=t.numel() * t.element_size()
            )
            for key, t in file.items()
        }
        config = backend.config(backends.parse(name), "bfloat16") or {}
        found = backend.find(infos, {"quantization_config": config} if config else {})
        if not found:  # no ecosystem has these keys; sdquant's own metadata describes them
            return
        assert [f.name for f in found] == ["block.proj.weight"]
        assert found[0].scheme == name
        assert set(found[0].keys.values()) | set(found[0].extra) == set(file)
        read = backend.read(found[0], tuple(weight.shape), file.__getitem__)
        assert torch.equal(backend.decode(read, torch.float32), backend.decode(packed, torch.float32))

    @pytest.mark.parametrize("value", [0.0, 1e-30, 3.0])
    def test_constant_weights_give_no_nan(self, name: str, kind: str, value: float) -> None:
        _packed(name, kind)
        weight = torch.full(SHAPES[kind], value, dtype=torch.float32)
        backend = backends.of_scheme(name)
        back = backend.decode(backend.encode(weight, backends.parse(name)), torch.float32)
        assert torch.isfinite(back).all()
        # The smallest tables have an even number of negative weights in eight, and nothing near zero.
        assert (back - weight).abs().max() <= (0.75 if name.startswith(("iq2", "iq1")) else 0.3) * value + 1e-6


def _slow_to_write(name: str) -> list[pytest.MarkDecorator]:
    """libgguf searches for seconds; other types have the same layers."""
    return [pytest.mark.slow] if name.startswith(("iq1", "iq2")) else []


def _layer(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    if kind == "conv":
        return nn.Conv2d(32, 64, 3, padding=1, dtype=torch.bfloat16), torch.randn(2, 32, 20, 20).bfloat16()
    shape = SHAPES[kind]
    return nn.Linear(shape[1], shape[0], dtype=torch.bfloat16), torch.randn(1100, shape[1]).bfloat16()


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("name", NAMED)
def test_plain_layer_computes_with_the_decoded_weight(name: str, kind: str) -> None:
    layer, x = _layer(kind)
    backend = backends.of_scheme(name)
    try:
        packed = backend.encode(layer.weight.data, backends.parse(name))
    except Unfit as reason:
        pytest.skip(f"{name} does not hold {tuple(layer.weight.shape)}: {reason}")
    plain = quantized_layer(layer, packed)
    branched = backend.low_rank(packed) is not None  # what is beside the codes is rounded on its own
    with torch.no_grad():
        layer.weight.copy_(backend.decode(packed, torch.bfloat16))
        if not fp32_gemm.is_profitable(torch.bfloat16) and not packed.spec.rotation and not branched:
            assert torch.equal(plain(x), layer(x))
    # Few rows, or outputs of a convolution, may be multiplied without decoding first: another order of the sums. So may
    # all be where torch has no fast product of bfloat16.
    few = x[:5] if kind == "linear" else x[:, :, :6, :5]
    # With AVX2 alone their weights are not rounded to bfloat16, and neither is the step before.
    form = backend.form(packed)
    reader = dispatch.way(backend, packed, form, torch.bfloat16).reader
    unrounded = form is not None and reader is not None and reader.unrounded(form, packed.parts, torch.bfloat16)
    turned = packed.spec.rotation > 0  # the activations' rotation is rounded to bfloat16, and the weight before its own
    for some in (few, x):
        double = copy.deepcopy(layer).double().requires_grad_(False)
        got, exact = plain(some).detach().double(), double(some.double())
        double.bias.zero_()
        product = double(some.double())
        double.weight.abs_()
        sizes = double(some.double().abs()) + (exact - product).abs()
        # Two roundings to bfloat16, of at most 2**-8 of the number: before the bias is added and after.
        of_weights = 2**-7 if turned or branched or (unrounded and some is few) else 1e-5
        assert bool(((got - exact).abs() <= 2**-8 * (product.abs() + exact.abs()) + of_weights * sizes).all())


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.runtimes[0] == "library"])
def test_library_module_holds_the_same_bits(name: str) -> None:
    layer, x = _layer("linear")
    backend = backends.of_scheme(name)
    spec = backends.parse(name)
    packed = backend.encode(layer.weight.data, spec)
    module = backend.to_library(layer, packed, spec)
    with torch.no_grad():
        out = module(x)
        plain = quantized_layer(layer, packed)(x)
    assert (out - plain).float().norm() / plain.float().norm() < 0.03  # the library's kernels round differently
    back = backend.from_library(module)  # after a forward, which must not have changed the weights
    assert back is not None and back.spec == packed.spec
    for part, tensor in packed.parts.items():
        assert torch.equal(tensor.view(torch.uint8), back.parts[part].view(torch.uint8)), part


@pytest.mark.parametrize("shape", [(128, 256), (77, 128), (50, 64)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=_slow_to_write(name)) for name in ROWS])
def test_embedding_looks_up_the_decoded_rows(name: str, shape: tuple[int, int]) -> None:
    table = nn.Embedding(*shape, dtype=torch.bfloat16)
    backend = backends.of_scheme(name)
    try:
        packed = backend.encode(table.weight.data, backends.parse(name))
    except Unfit as reason:
        pytest.skip(f"{name} does not hold {shape}: {reason}")
    layer = quantized_layer(table, packed)
    whole = backend.decode(packed, torch.bfloat16)
    torch.manual_seed(2)
    for size in ((1,), (2, 9), (1, 48), (3, 100)):  # fewer than there are rows, and more
        index = torch.randint(shape[0], size)
        assert torch.equal(layer(index), whole[index]), size
    assert next(p.dtype for p in layer.parameters() if p.is_floating_point()) == torch.bfloat16
    assert layer.to(torch.float16)(index).dtype == torch.float16
    with pytest.raises(IndexError):
        layer(torch.tensor([shape[0]]))


def test_some_scheme_of_each_backend_decodes_only_the_rows_looked_up() -> None:
    by_row = set()
    for name, row in ROWS.items():
        if row.backend in by_row or not (row.on_the_fly or row.backend == "gguf"):  # encoding in every one takes long
            continue
        packed = backends.of_scheme(name).encode(_weight((128, 256)), backends.parse(name))
        if backends.of_scheme(name).by_row(packed):
            by_row.add(row.backend)
    assert by_row == {row.backend for row in ROWS.values() if row.on_the_fly} | {"gguf"}  # of others: their own tests

"""Rotations: the matrices of comfy-kitchen, their own inverse, and every path of a layer in the right basis.

The rule: a packed weight with a rotation is the model's own weight (`decode`, `weight`, gradients, transforms); only
products multiply what is stored, beside a rotation of the activations.
"""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sdquant import backends
from sdquant.core.hadamard import is_regular, matrix, rotate_by_matrix
from sdquant.core.packed_rows import cut, join
from sdquant.errors import SettingsError
from sdquant.kernels import cpu_int8, dispatch, hadamard, int8_linear, int8_reference, preparation
from sdquant.kernels.cpu import extension
from sdquant.kernels.cpu import rotation as cpu_rotation
from sdquant.kernels.linear_with_rotation import LinearWithRotation
from sdquant.models import peft_hooks
from sdquant.nn import quantized_layer
from sdquant.nn.layer_factory import float_layer, set_compute

if TYPE_CHECKING:
    from sdquant.nn.quantized_layers import QuantizedLayer

# Of torch's own decompositions, at the first forward-mode derivative of a process; a FutureWarning from torch 2.15 on.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
NATIVE: Any = extension()
needs_native = pytest.mark.skipif(NATIVE is None, reason="the C extension is not built")
GOLDEN = Path(__file__).parents[1] / "backends" / "golden"


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [4, 16, 64])
def test_the_matrices_are_those_of_comfy_kitchen(size: int) -> None:
    theirs = load_file(GOLDEN / "comfy_hadamard_regular.safetensors")[f"h{size}"].float() / size**0.5
    assert torch.equal(matrix(size, torch.float32, torch.device("cpu")), theirs)
    assert torch.allclose(hadamard.rotate(torch.eye(size), size), theirs, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [4, 8, 16, 64, 128, 256, 1024])
def test_both_ways_of_computing_it(group: int, dtype: torch.dtype) -> None:
    x = _numbers(3, 5, 2048).to(dtype)
    exact = rotate_by_matrix(x.double(), group)
    got = hadamard.rotate(x, group)
    assert got.dtype == dtype and got.shape == x.shape
    assert (got.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert (hadamard.rotate(exact, group) - x.double()).abs().max() < 1e-12  # its own inverse
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(hadamard.rotate(x, group), got)
    with torch.inference_mode():
        assert torch.equal(hadamard.rotate(x, group), got)


def test_its_gradient() -> None:
    x = _numbers(2, 32).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: hadamard.rotate(x, 16), (x,))
    assert torch.autograd.gradgradcheck(lambda x: hadamard.rotate(x, 16).square(), (x,))


@pytest.mark.parametrize(("size", "is_one"), [(4, True), (256, True), (1, False), (0, False), (128, False), (-4, False),
                                              (16.0, False), (True, False), ("16", False), (None, False)])  # fmt: skip
def test_group_sizes(size: object, is_one: bool) -> None:
    assert is_regular(size) is is_one


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [4, 16, 64, 256, 1024])
def test_the_c_kernels(group: int, dtype: torch.dtype) -> None:
    x = _numbers(3, 7, 1024 if group > 4 else 20).to(dtype)
    exact = rotate_by_matrix(x.double(), group)
    results = []
    for name in ("portable", "avx2", "avx512bf16", ""):
        if NATIVE.choose(name):
            got = cpu_rotation.rotate_rows(x, group)
            assert got is not None and got.dtype == dtype and got.shape == x.shape
            assert (got.double() - exact).abs().max() <= (torch.finfo(dtype).eps + 2e-6) * exact.abs().max()
            results.append(got)
    assert len(results) >= 2 and all(torch.equal(one, results[0]) for one in results)
    turned = x.transpose(0, 1)
    assert torch.equal(hadamard.rotate(turned, group), results[0].transpose(0, 1))
    assert hadamard.rotate(x[:0], group).shape == x[:0].shape


@pytest.mark.skipif(not cpu_int8.instructions(256), reason="no C kernels for products of integers on this machine")
@pytest.mark.parametrize("rows", [1, 5, 33, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_rotated_while_they_are_quantized(rows: int, dtype: torch.dtype) -> None:
    """The same numbers as of activations that are rotated before, in float32."""
    layer, _ = _layer(48, 256)
    packed, x = layer.packed, _numbers(rows, 256, seed=3).to(dtype)
    codes = packed.without_rotation
    form = layer._backend.form(codes)
    assert form is not None
    prepared = preparation.prepared(layer._backend, packed, None, dtype, "int8", "")
    assert isinstance(prepared, LinearWithRotation) and prepared.at_once is not None
    got = prepared.at_once(x, codes.parts)
    assert (got is None) == (rows < int8_linear.least(codes, form, dtype))  # so few are left to the exact product
    if got is not None:
        x = hadamard.rotate(x.float(), 256)
        want = cpu_int8.linear(form, codes.parts, int8_reference.coding(codes, form), x, None)
        assert torch.equal(got, want.to(dtype))


@pytest.mark.parametrize("compute", [None, "int8"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_every_call_has_the_same_numbers(rows: int, compute: str | None) -> None:
    """The first call of a layer, which is not prepared, those after it, a compiled one, and one with strides."""
    layer, _ = _layer(48, 256, torch.bfloat16)
    set_compute(layer, compute)
    x = _numbers(rows, 256, seed=3).bfloat16()
    with torch.no_grad():
        first = layer(x)
        assert torch.equal(layer(x), first) and torch.equal(layer(x[None].transpose(0, 1))[:, 0], first)
        assert torch.equal(torch.compile(layer, backend="aot_eager")(x), first)
        wide = torch.cat([x, x], dim=1)[:, :256]
        assert torch.equal(layer(wide), first)


# Float32, so that each path is as good as exact; 80 inputs are rotated in groups of 16.
SIZES = [(48, 256), (33, 64), (20, 80)]


def _layer(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[QuantizedLayer, nn.Linear]:
    floats = nn.Linear(columns, rows)
    floats.weight.data, floats.bias.data = _numbers(rows, columns, seed=1), _numbers(rows, seed=2)
    floats.weight.data[:, 3] *= 30  # an outlier, which shows in which basis a product is
    packed = backends.of_scheme("int8_convrot").encode(floats.weight.data, backends.parse("int8_convrot"))
    assert packed.spec.rotation
    layer = quantized_layer(floats, packed)
    floats.weight.data = layer.dequantize()
    floats.requires_grad_(False)
    return layer.requires_grad_(False).to(dtype), floats.to(dtype)


def _close(got: Tensor, want: Tensor, least: float = 2e-6) -> None:
    assert (got - want).norm() <= least * want.norm()


@pytest.mark.parametrize("size", SIZES)
class TestOneBasis:
    @pytest.mark.parametrize("rows", [1, 3, 20, 700])
    def test_products(self, rows: int, size: tuple[int, int]) -> None:
        layer, floats = _layer(*size)
        x = _numbers(2, rows, size[1], seed=3)
        with torch.no_grad():
            for _ in range(2):  # as it comes, and prepared
                _close(layer(x), floats(x))
            turned = x.transpose(0, 1)
            _close(layer(turned), floats(turned))

    def test_products_in_eight_bits(self, size: tuple[int, int]) -> None:
        layer, floats = _layer(*size)
        set_compute(layer, "int8")
        x = _numbers(100, size[1], seed=3)
        with torch.no_grad():
            for _ in range(2):
                _close(layer(x), floats(x), 0.02)

    def test_gradients(self, size: tuple[int, int]) -> None:
        layer, floats = _layer(*size)
        one, other = (_numbers(4, size[1], seed=3).requires_grad_() for _ in range(2))
        layer(one).square().sum().backward()
        floats(other).square().sum().backward()
        assert one.grad is not None and other.grad is not None
        _close(one.grad, other.grad)

    def test_gradients_of_gradients(self, size: tuple[int, int]) -> None:
        layer, floats = _layer(*size)
        results = []
        for each in (layer, floats):
            x = _numbers(4, size[1], seed=3).requires_grad_()
            (first,) = torch.autograd.grad(each(x).pow(3).sum(), x, create_graph=True)
            results.append(torch.autograd.grad(first.square().sum(), x)[0])
        _close(*results, least=1e-5)

    def test_compiled(self, size: tuple[int, int]) -> None:
        layer, floats = _layer(*size)
        run = torch.compile(layer, backend="aot_eager", fullgraph=True)
        one, other = (_numbers(4, size[1], seed=3).requires_grad_() for _ in range(2))
        y = run(one)
        _close(y, floats(other))
        y.square().sum().backward()
        floats(other).square().sum().backward()
        assert one.grad is not None and other.grad is not None
        _close(one.grad, other.grad)

    def test_transformed(self, size: tuple[int, int]) -> None:
        layer, floats = _layer(*size)
        x, tangent = _numbers(4, size[1], seed=3), _numbers(4, size[1], seed=4)
        _close(torch.func.vmap(layer)(x), floats(x))
        _close(torch.func.jvp(layer, (x,), (tangent,))[1], floats(tangent) - floats.bias)
        _close(
            torch.func.grad(lambda x: layer(x).square().sum())(x),
            torch.func.grad(lambda x: floats(x).square().sum())(x),
        )

    def test_the_weight_as_a_tensor(self, size: tuple[int, int]) -> None:
        layer, floats = _layer(*size)
        assert torch.equal(layer.weight + 0, floats.weight)
        assert torch.equal(float_layer(layer).weight, floats.weight)  # type: ignore[arg-type]

    def test_copies_and_state_dicts(self, size: tuple[int, int]) -> None:
        layer, floats = _layer(*size)
        x = _numbers(3, size[1], seed=3)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other, _ = _layer(*size)
        other.set_part("codes", torch.zeros_like(other.packed.parts["codes"]))
        other.load_state_dict(layer.state_dict())
        again, _ = _layer(*size)
        again.load_state_dict({"weight": floats.weight, "bias": floats.bias})  # floats are quantized alike
        with torch.no_grad():
            layer(x)
            for one in (copy.deepcopy(layer), torch.load(file, weights_only=False), other):
                assert torch.equal(one(x), layer(x))
            _close(again(x), floats(x), 1e-3)

    def test_rows(self, size: tuple[int, int]) -> None:
        layer, floats = _layer(*size)
        packed = layer.packed
        parts = [cut(packed, [(0, 7)]), cut(packed, [(7, size[0])])]
        decode = backends.get("comfy").decode
        assert torch.equal(torch.cat([decode(part, torch.float32) for part in parts]), floats.weight)
        joined = join(parts)
        assert joined is not None and torch.equal(decode(joined, torch.float32), floats.weight)


def test_kernels_are_used_for_what_is_stored() -> None:
    """A rotated weight itself has no layout; the stored one passes the check of the kernels against the backend."""
    layer, _ = _layer(48, 256)
    backend, packed = backends.get("comfy"), layer.packed
    assert backend.form(packed) is None
    form = backend.form(packed.without_rotation)
    assert form is not None
    assert packed.without_rotation.spec.rotation == 0 and packed.without_rotation.spec is packed.without_rotation.spec
    if dispatch.readers("cpu"):
        assert dispatch.way(backend, packed.without_rotation, form, torch.float32).reader is not None


def test_weights_in_another_basis_are_not_taken_as_they_are() -> None:
    """The parts of both have the same names and shapes."""
    layers = []
    for name in ("int8_row", "int8_convrot"):
        floats = nn.Linear(64, 32, bias=False)
        floats.weight.data = _numbers(32, 64, seed=len(layers))
        packed = backends.of_scheme(name).encode(floats.weight.data, backends.parse(name))
        layers.append(quantized_layer(floats, packed))
        peft_hooks.prepare(layers[-1])
    plain, rotated = layers
    with pytest.raises(SettingsError, match="packed in another way"):
        rotated.weight = plain.weight
    rotated.load_state_dict(plain.state_dict())
    _close(rotated.dequantize(), plain.dequantize(), 0.01)


@pytest.mark.parametrize("rotation", [16, 20, 1 << 20, "16", -4])
def test_no_kernel_sees_groups_that_are_not_whole(rotation: Any) -> None:
    packed = backends.of_scheme("int8_row").encode(_numbers(4, 24), backends.parse("int8_row"))
    with pytest.raises(ValueError, match="cannot be rotated"):
        _ = replace(packed.spec, details={"rotation": rotation}).rotation
    with pytest.raises((ValueError, TypeError)):
        hadamard.rotate(_numbers(2, 24), rotation)


def test_with_a_lora_and_autocast() -> None:
    peft = pytest.importorskip("peft")
    layer, floats = _layer(48, 256)
    results = []
    for one in (layer, floats):
        model = nn.Sequential()
        model.add_module("proj", one)
        torch.manual_seed(5)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["proj"], r=4, init_lora_weights=False))
        x = _numbers(6, 256, seed=3)
        y = wrapped(x)
        y.square().sum().backward()
        gradients = [p.grad for p in wrapped.parameters() if p.grad is not None]
        assert len(gradients) == 2
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            low = wrapped(x)
        assert low.dtype == torch.bfloat16
        results.append([y.detach(), *gradients, low.float()])
    for number, (one, other) in enumerate(zip(*results, strict=True)):
        _close(one, other, 2e-2 if number == 3 else 1e-5)

"""A bound launch passes a compiled kernel what Triton's own passes it: seen by a driver that launches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

triton = pytest.importorskip("triton")

from triton.runtime import driver  # noqa: E402

from bench._no_card import NoCard  # noqa: E402
from sdquant import backends  # noqa: E402
from sdquant.kernels.base import Coding, EightBit  # noqa: E402
from sdquant.kernels.int8_reference import AGAIN_RUN, coding, needs_sums  # noqa: E402
from sdquant.kernels.triton import (  # noqa: E402
    activations,
    bound_branch,
    bound_decode,
    bound_eight,
    bound_launch,
    bound_linear,
    bound_scheme,
    branch,
    branch_sides,
    expansion,
    launch,
    products,
    rotation,
    scheme_gemm,
    scheme_scaling,
)
from sdquant.nn import quantized_layer  # noqa: E402
from sdquant.nn.quantized_layers import PREFIX  # noqa: E402
from sdquant.rules import PtqProvider, QuantizationRule  # noqa: E402

SCHEMES = ("nf4", "nf4,double_quant", "int8_sym", "int8", "int4", "qint4", "q8_0", "q4_k", "sdnq-uint4", "fp8")
KERNELS = (
    launch.decode_kernel, launch.one_row_kernel, launch.rows_kernel, activations.quantize_kernel,
    activations.again_kernel, products.product_kernel, products.runs_kernel, rotation.rotate_kernel,
    branch.branch_kernel, branch_sides.down_kernel, branch_sides.up_kernel, scheme_gemm.tiles_kernel,
    scheme_gemm.tiled_product_kernel, expansion.expand_kernel, scheme_gemm.numbers_kernel,
    scheme_scaling.scaling_kernel,
)  # fmt: skip
LAUNCHED: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = []


class _Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *given: Any, **_: Any) -> None:
        # Grid; then stream, function, metadata of the kernel and of the launch, two hooks; then the kernel's arguments.
        own = tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in given[9:])
        LAUNCHED.append((self.name, given[:3], own))


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of the CPU count as those of device -1, which is the current one."""
    monkeypatch.setattr(bound_linear, "current_index", lambda x: -1)
    monkeypatch.setattr(driver, "_active", NoCard(_Launcher, 80))
    LAUNCHED.clear()
    for kernel in KERNELS:
        kernel.device_caches.clear()
    yield
    for kernel in KERNELS:
        kernel.device_caches.clear()


def _bound(
    scheme: str, bias: bool, eight: EightBit | None = None, rotation: int = 0
) -> tuple[nn.Module, bound_linear.BoundLinear]:
    spec = backends.parse(scheme)
    floats = nn.Linear(512, 64, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    layer: Any = quantized_layer(floats, spec.scheme.codec.encode(floats.weight.data, spec))
    form = layer._backend.form(layer.packed.without_rotation)
    return layer, bound_eight.bind(form, layer.packed.parts, torch.bfloat16, 16, PREFIX, eight, rotation)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_arguments_are_those_of_tritons_own_launch(scheme: str, rows: int, bias: bool) -> None:
    layer, bound = _bound(scheme, bias)
    x = torch.ones(1, rows, 512, dtype=torch.bfloat16)
    kept = [bound(x, layer._parameters) for _ in range(3)]
    assert all(y is not None and y.shape == (1, rows, 64) for y in kept)
    (name, grid, first), *others = LAUNCHED
    assert len(others) == 2
    kernel = next(one for one in KERNELS if one.fn.__name__ == name)
    out = kernel.arg_names.index("out")
    for other_name, other_grid, values in others:
        assert (other_name, other_grid) == (name, grid)
        assert [v for i, v in enumerate(values) if i != out] == [v for i, v in enumerate(first) if i != out]
        if rows < 40:
            assert values[out] in [y.data_ptr() for y in kept if y is not None]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "scheme", ["svdq-int4", "svdq-nvfp4", "sdnq-uint4,svd=true", "sdnq-uint4,svd=true,hadamard=true"]
)
def test_the_launches_beside_a_branch(
    scheme: str, dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one row, of many with either way to decode the weight, and in integers."""
    spec = backends.parse(scheme)
    floats = nn.Linear(512, 64, bias=bias, dtype=dtype).requires_grad_(False)
    layer: Any = quantized_layer(floats, spec.scheme.codec.encode(floats.weight.data, spec))
    codes = layer.packed.without_rotation if layer.packed.spec.rotation else layer.packed
    of, parts = layer._backend.low_rank(codes), codes.parts
    residual = replace(codes, parts=of.residual_of(parts))
    form = layer._backend.form(residual)
    eight = EightBit(100, coding(residual, form), sums=needs_sums(form), timed=False)
    bound = bound_branch.bind_with_branch(
        form, residual.parts, of, parts, dtype, 4, 4, PREFIX, eight, layer.packed.spec.rotation
    )
    assert bound is not None
    kernels = {kernel.fn.__name__: kernel for kernel in KERNELS}
    rotates = ["rotate_kernel"] if layer.packed.spec.rotation else []
    wholes = [["down_kernel", "branch_kernel"], [*rotates, "branch_kernel"]]
    cases = [(4, False, ["down_kernel", "rows_kernel", "up_kernel"])]
    cases += [(40, whole, wholes[whole or dtype == torch.float16]) for whole in (False, True)]
    cases += [(100, False, ["down_kernel", "again_kernel", "product_kernel", "up_kernel"])]
    for rows, whole, wanted in cases:
        monkeypatch.setattr(bound_branch, "prefers_other", lambda kind, *of, whole=whole: whole and kind[0] == "whole")
        LAUNCHED.clear()
        x = torch.ones(1, rows, 512, dtype=dtype)
        kept = [bound(x, layer._parameters) for _ in range(3)]
        assert all(y is not None and (y.shape, y.dtype) == ((1, rows, 64), dtype) for y in kept)
        names = [name for name, _, _ in LAUNCHED]
        assert names == 3 * wanted, (names, wanted)
        many = len(wanted)
        for at, name in enumerate(wanted):
            mine = FRESH_OF_A_BRANCH if name != "rotate_kernel" else ("out",)
            for turn in (1, 2):
                _same(LAUNCHED[at], LAUNCHED[turn * many + at], kernels[name], mine)
        first = dict(zip(kernels[wanted[0]].arg_names, LAUNCHED[0][2], strict=True))
        if wanted[0] == "down_kernel":
            assert (first["x"], first["down"]) == (x.data_ptr(), parts[of.down].data_ptr())
            last = dict(zip(kernels[wanted[-1]].arg_names, LAUNCHED[-1][2], strict=True))
            assert last["up"] == parts[of.up].data_ptr()
    for other in (x.double(), x[..., ::2], x.clone().requires_grad_(), x[:, :0]):
        assert bound(other, layer._parameters) is None


FRESH_OF_A_BRANCH = (
    "out", "y", "inputs", "between", "scale", "sums", "x", "codes", "out_scale", "row_scale", "weight", "zero", "bias",
)  # fmt: skip


@pytest.mark.parametrize("scheme", [*SCHEMES, "comfy:nvfp4", "mxfp8"])
def test_weights_of_one_form_are_decoded_by_one_kernel(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound_decode, "_bound", {})
    spec = backends.parse(scheme)
    codec = spec.scheme.codec
    made = [codec.encode(torch.randn(64, 512).bfloat16(), spec) for _ in range(2)]
    for packed in (made[0], made[1], made[1]):
        bound_decode.decode_into(codec.form(made[0]), packed.parts, torch.empty(64, 512, dtype=torch.bfloat16))
    _, second, third = LAUNCHED
    assert len(bound_decode._bound) == 1
    names = launch.decode_kernel.arg_names
    given = dict(zip(names, second[2], strict=True))
    assert given["codes"] == made[1].parts[codec.form(made[1]).codes].data_ptr()
    _same(second, third, launch.decode_kernel, ("out",))
    bound_decode._bound.clear()
    launch.decode(codec.form(made[0]), made[1].parts, torch.empty(64, 512, dtype=torch.bfloat16))(torch.device("cpu"))
    _same(LAUNCHED[-1], second, launch.decode_kernel, ("out",))


def _same(first: tuple[Any, ...], other: tuple[Any, ...], kernel: Any, fresh: tuple[str, ...]) -> None:
    """Hold that two launches have the same arguments, but for the addresses of what each call makes anew."""
    (name, grid, values), (other_name, other_grid, others) = first, other
    assert (name, grid) == (other_name, other_grid)
    for parameter, value, wanted in zip(kernel.arg_names, others, values, strict=True):
        assert parameter in fresh or value == wanted, parameter


FRESH = ("x", "out", "codes", "scale", "sums", "row_scale", "weight", "bias", "zero")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scheme", ["int8_sym", "int8", "nf4", "q4_k", "q8_0", "mxfp8", "sdnq-int8"])
def test_the_launches_of_a_product_in_integers_are_those_of_triton(scheme: str, bias: bool) -> None:
    layer, _ = _bound(scheme, bias)
    of = coding(layer.packed, layer._form)
    layer, bound = _bound(scheme, bias, EightBit(32, of, sums=needs_sums(layer._form), run=AGAIN_RUN))
    x = torch.ones(1, 40, 512, dtype=torch.bfloat16)
    kept = [bound(x, layer._parameters) for _ in range(3)]
    assert all(y is not None and y.shape == (1, 40, 64) for y in kept)
    number = len(LAUNCHED) // 3
    assert number == (3 if of & Coding.AGAIN else 2)
    kernels = {kernel.fn.__name__: kernel for kernel in KERNELS}
    for at in range(number):
        kernel = kernels[LAUNCHED[at][0]]
        fresh = tuple(name for name in FRESH if name in kernel.arg_names)
        if kernel is activations.again_kernel:
            fresh = ("out", "out_scale")
        for turn in (1, 2):
            _same(LAUNCHED[at], LAUNCHED[turn * number + at], kernel, fresh)
    last = kernels[LAUNCHED[-1][0]].arg_names
    given = dict(zip(last, LAUNCHED[-1][2], strict=True))
    quantized = dict(zip(activations.quantize_kernel.arg_names, LAUNCHED[-number][2], strict=True))
    assert (given["x"], given["row_scale"]) == (quantized["codes"], quantized["scale"])
    if not of & Coding.AGAIN:
        assert given["weight"] == layer.packed.parts[layer._form.codes].data_ptr()
        assert given["scale"] == layer.packed.parts[layer._form.scale].data_ptr()
        assert not needs_sums(layer._form) or given["sums"] == quantized["sums"]
    else:
        requantized = dict(zip(activations.again_kernel.arg_names, LAUNCHED[-2][2], strict=True))
        assert (given["weight"], given["scale"]) == (requantized["out"], requantized["out_scale"])
    if bias:
        assert given["bias"] == layer.bias.data_ptr()


@pytest.mark.parametrize(("scheme", "coding"), [("fp8,packing=float8", Coding.BY_ROW), ("nf4", Coding.AGAIN)])
def test_a_product_in_8_bit_floats_is_two_or_four_launches(scheme: str, coding: Coding) -> None:
    given: list[tuple[Any, ...]] = []

    def multiply(x: Any, x_scale: Any, w: Any, scale: Any, bias: Any) -> Any:
        given.append((x.data_ptr(), w.data_ptr(), x_scale.data_ptr(), scale.data_ptr()))
        assert w.shape == (64, 512) and w.is_contiguous() and bias is not None
        return torch.zeros(len(x), 64, dtype=torch.bfloat16)

    layer, bound = _bound(scheme, True, EightBit(32, coding, floats=multiply))
    x = torch.ones(1, 40, 512, dtype=torch.bfloat16)
    assert all(bound(x, layer._parameters).shape == (1, 40, 64) for _ in range(3))  # type: ignore[union-attr]
    assert len(given) == 3 and len(LAUNCHED) == (3 if coding is Coding.BY_ROW else 9)
    quantized = dict(zip(activations.quantize_kernel.arg_names, LAUNCHED[-len(LAUNCHED) // 3][2], strict=True))
    assert (quantized["codes"], quantized["scale"]) == (given[-1][0], given[-1][2])
    if coding is Coding.BY_ROW:
        assert given[-1][1] == layer.packed.parts[layer._form.codes].data_ptr()
    else:
        of_weight = dict(zip(activations.quantize_kernel.arg_names, LAUNCHED[-1][2], strict=True))
        assert (of_weight["codes"], of_weight["scale"]) == (given[-1][1], given[-1][3])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "number"), [(1, 2), (17, 2), (40, 2)])
def test_a_rotated_weight_is_two_launches_and_torchs_product(rows: int, number: int, bias: bool) -> None:
    """In integers the activations are rotated while they are quantized, else before."""
    layer, bound = _bound("int8_convrot", bias, EightBit(32, Coding.BY_ROW), 256)
    assert layer.packed.spec.rotation == 256
    x = torch.ones(1, rows, 512, dtype=torch.bfloat16)
    kept = [bound(x, layer._parameters) for _ in range(3)]
    assert all(y is not None and y.shape == (1, rows, 64) for y in kept) and len(LAUNCHED) == 3 * number
    kernels = {kernel.fn.__name__: kernel for kernel in KERNELS}
    for at in range(number):
        kernel = kernels[LAUNCHED[at][0]]
        fresh = tuple(name for name in FRESH if name in kernel.arg_names and (at or name != "x"))
        for turn in (1, 2):
            _same(LAUNCHED[at], LAUNCHED[turn * number + at], kernel, fresh)
    first = dict(zip(kernels[LAUNCHED[-2][0]].arg_names, LAUNCHED[-2][2], strict=True))
    last = dict(zip(kernels[LAUNCHED[-1][0]].arg_names, LAUNCHED[-1][2], strict=True))
    if rows == 40:
        assert first["STEPS"] == 4 and (last["x"], last["row_scale"]) == (first["codes"], first["scale"])
        assert last["weight"] == layer.packed.parts["codes"].data_ptr()
    else:
        names = [name for name, _, _ in LAUNCHED[:2]]
        assert names == ["rotate_kernel", "one_row_kernel" if rows == 1 else "decode_kernel"]
        assert rows > 1 or last["x"] == first["out"]
    assert not bias or rows != 40 or last["bias"] == layer.bias.data_ptr()


@pytest.mark.parametrize("other", [True, False])
@pytest.mark.parametrize(
    ("few", "rows", "kernels"),
    [(1, 1, "one_row"), (16, 1, "one_row"), (1, 7, "decode rows"), (16, 7, "rows decode"), (1, 64, "decode rows"),
     (1, 65, "decode pieces"), (16, 1024, "decode pieces"), (16, 1025, "decode")],
)  # fmt: skip
def test_what_is_faster_is_found_by_measuring(
    few: int, rows: int, kernels: str, other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card decides whether few rows are multiplied by the packed weight, and more by pieces of the decoded one."""
    asked: list[Any] = []
    monkeypatch.setattr(bound_linear, "prefers_other", lambda *of: bool(asked.append(of)) or other)
    monkeypatch.setattr(bound_linear, "pieces_of", lambda *of: 128)
    floats = nn.Linear(512, 300, dtype=torch.bfloat16).requires_grad_(False)
    spec = backends.parse("nf4")
    layer: Any = quantized_layer(floats, spec.scheme.codec.encode(floats.weight.data, spec))
    bound = bound_eight.bind(layer._form, layer.packed.parts, torch.bfloat16, few, PREFIX, None, most=64)
    x = torch.ones(rows, 512, dtype=torch.bfloat16)
    for turn in range(3):
        LAUNCHED.clear()
        y = bound(x, layer._parameters)
        assert y is not None and y.shape == (rows, 300)
        usual, _, second = kernels.partition(" ")
        name = second if other and second else usual
        wanted = ["decode_kernel"] * 3 if name == "pieces" else [f"{name}_kernel"]
        assert [kernel for kernel, _, _ in LAUNCHED] == wanted, turn
        if name == "pieces":
            given = [dict(zip(launch.decode_kernel.arg_names, values, strict=True)) for _, _, values in LAUNCHED]
            assert [of["first"] for of in given] == [0, 16, 32] and len({of["out"] for of in given}) == 1
            assert [grid[0] for _, grid, _ in LAUNCHED] == [16, 16, 6]  # of 4096 weights
    assert bool(asked) == bool(second)
    if asked:
        kind, number, _, usual_way, other_way = asked[0]
        assert number == rows and kind[0] in ("decoded", "multiplied", "pieces") and "nf4" in kind
        assert all(way().shape == (rows, 300) for way in (usual_way, other_way))


@pytest.mark.parametrize(
    ("cache", "pieces"), [(50 << 20, 4096), (72 << 20, 6144), (40 << 20, 3072), (3 << 20, 0), (200 << 20, 0), (0, 0)]
)
def test_pieces_fill_half_of_a_cards_cache(cache: int, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an H100, a 4090, an A100, a 3060, none, and where it is not known."""
    from sdquant.kernels.triton import pieces as module

    monkeypatch.setattr(module, "_cache_bytes", lambda device: cache)
    form = replace(_bound("nf4", False)[1].form, rows=12288, columns=3072)
    assert module.pieces_of(form, torch.bfloat16, torch.device("cuda:0")) == pieces


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("scheme", ["nf4", "int8_sym", "sdnq-uint4", "q8_0"])
def test_a_convolution_is_one_launch_and_torchs_own(scheme: str, kernel: int) -> None:
    """Which takes 17 us of the host, and took 110 before it was bound to the layer."""
    spec, seen = backends.parse(scheme), []
    floats = nn.Conv2d(64, 32, kernel, padding=1, stride=2, dtype=torch.bfloat16).requires_grad_(False)
    layer: Any = quantized_layer(floats, spec.scheme.codec.encode(floats.weight.data, spec))

    def run(x: Any, weight: Any, *of: Any) -> Any:
        seen.append((x.shape, weight.shape, weight.data_ptr(), *of[1:]))
        return x

    form, parts = layer._backend.form(layer.packed), layer.packed.parts
    bound = bound_linear.BoundConvolution(form, parts, torch.bfloat16, PREFIX, layer.spec.shape, run)
    x = torch.ones(2, 64, 5, 7, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    assert all(bound(x, layer) is x for _ in range(3)) and len(LAUNCHED) == len(seen) == 3
    for turn in (1, 2):
        _same(LAUNCHED[0], LAUNCHED[turn], launch.decode_kernel, ("out",))
    given = dict(zip(launch.decode_kernel.arg_names, LAUNCHED[-1][2], strict=True))
    assert given["codes"] == parts[form.codes].data_ptr() and given["out"] == seen[-1][2]
    assert seen[-1][1] == (32, 64, kernel, kernel) and seen[-1][3:] == ((2, 2), (1, 1), (1, 1), 1)
    assert bound(x[0], layer) is None and bound(x.float(), layer) is None and bound(x[:0], layer) is None
    layer.padding_mode = "circular"
    assert bound(x, layer) is None
    layer.padding_mode, layer.weight_function = "zeros", [lambda weight: weight]
    assert bound(x, layer) is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("weight", "tile", "method"),
    [("int8", None, "absmax"), ("int8", 128, "absmax"), ("int4", None, "absmax"), ("int8", None, "minmax")],
)  # fmt: skip
def test_the_launches_of_a_rule_are_those_of_triton(weight: str, tile: int | None, method: str, bias: bool) -> None:
    rule = QuantizationRule(
        weight_qtype=weight, act_qtype="int8", tile_size=tile, weight_calibration_method=method
    )  # fmt: skip
    floats = nn.Linear(512, 64, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    layer: Any = PtqProvider([]).layer(floats, rule, "a")
    bound = bound_scheme.BoundScheme(
        layer._form, layer.packed.parts, torch.bfloat16, layer._activations, PREFIX
    )  # fmt: skip
    x = torch.ones(1, 40, 512, dtype=torch.bfloat16)
    kept = [bound(x, layer._parameters) for _ in range(3)]
    assert all(y is not None and y.shape == (1, 40, 64) for y in kept)
    number = len(LAUNCHED) // 3
    assert number == (3 if weight == "int4" else 2)
    kernels = {kernel.fn.__name__: kernel for kernel in KERNELS}
    for at in range(number):
        kernel = kernels[LAUNCHED[at][0]]
        fresh = tuple(name for name in (*FRESH, "known") if name in kernel.arg_names)
        for turn in (1, 2):
            _same(LAUNCHED[at], LAUNCHED[turn * number + at], kernel, fresh)
    product = dict(zip(scheme_gemm.tiled_product_kernel.arg_names, LAUNCHED[-1][2], strict=True))
    rows = dict(zip(scheme_gemm.tiles_kernel.arg_names, LAUNCHED[-2][2], strict=True))
    assert (product["x"], product["row_scale"]) == (rows["codes"], rows["scale"]) and rows["x"] == x.data_ptr()
    parts = layer.packed.parts
    assert product["scale"] == parts["scale"].data_ptr()
    assert weight == "int4" or product["weight"] == parts["qvalue"].data_ptr()
    assert method != "minmax" or (product["sums"], product["zero"]) == (rows["sums"], parts["zero_point"].data_ptr())
    assert not bias or product["bias"] == layer.bias.data_ptr()


def test_a_launch_that_a_thread_has_found_is_there_when_others_are_forgotten() -> None:
    layer, bound = _bound("nf4", False)
    x = torch.ones(1, 512, dtype=torch.bfloat16)
    bound(x, layer._parameters)
    (key,), found = bound.launches, bound.launches
    found |= dict.fromkeys(range(bound_launch.MOST_KEPT))
    bound(x.repeat(7, 1), layer._parameters)
    assert key in found and key not in bound.launches and len(bound.launches) == 1


def test_a_static_scale_on_another_device_is_left_to_others() -> None:
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
    floats = nn.Linear(512, 64, dtype=torch.bfloat16).requires_grad_(False)
    layer: Any = PtqProvider([]).layer(floats, rule, "a")
    how = replace(layer._activations, scale="act_scale")
    bound = bound_scheme.BoundScheme(layer._form, layer.packed.parts, torch.bfloat16, how, PREFIX)
    x, own = torch.ones(2, 512, dtype=torch.bfloat16), {**layer._parameters, PREFIX + "act_scale": torch.ones(1)}
    assert bound(x, own) is not None

    class Elsewhere(torch.Tensor):
        def get_device(self) -> int:
            return 1

    assert bound(x, {**own, PREFIX + "act_scale": torch.ones(1).as_subclass(Elsewhere)}) is None


def test_a_weight_that_has_moved_is_read_where_it_is() -> None:
    layer, bound = _bound("nf4", False)
    x = torch.ones(1, 512, dtype=torch.bfloat16)
    bound(x, layer._parameters), bound(x, layer._parameters)
    name = layer.part_names[0]
    layer.set_part(name, layer.packed.parts[name].clone())
    bound(x, layer._parameters)
    codes = launch.one_row_kernel.arg_names.index("codes")
    assert LAUNCHED[1][2][codes] != LAUNCHED[2][2][codes] == layer.packed.parts[layer._form.codes].data_ptr()


def _odd(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.float(), lambda x: x[:0], lambda x: x.repeat(41, 1), lambda x: x[:, :256], _odd,
        lambda x: x.clone().requires_grad_(), lambda x: x.repeat(1, 2)[:, ::2],
    ],
    ids=["another dtype", "no rows", "too many rows", "another width", "no aligned address", "gradient", "strided"],
)  # fmt: skip
def test_what_the_kernel_was_not_compiled_for_is_left_to_others(change: Any) -> None:
    layer, bound = _bound("nf4", True, EightBit(41, None))
    assert bound(change(torch.ones(1, 512, dtype=torch.bfloat16)), layer._parameters) is None
    assert not LAUNCHED


def test_a_bias_that_learns_is_left_to_others() -> None:
    layer, bound = _bound("nf4", True)
    x = torch.ones(1, 512, dtype=torch.bfloat16)
    layer.bias.requires_grad_()
    assert bound(x, layer._parameters) is None
    with torch.no_grad():
        assert bound(x, layer._parameters) is not None

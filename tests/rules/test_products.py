"""Products of two activations: forward and gradients are what the formulas give when they are computed in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdquant.errors import SettingsError
from sdquant.rules.core.batched_matmul import multiply
from sdquant.rules.core.einsum import einsum
from sdquant.rules.core.how_to_quantize import HowToQuantize
from sdquant.rules.core.qarray import dequantize, quantize
from sdquant.rules.providers.product import Found, Site, product
from sdquant.rules.qconfig import QtRule, QuantizationRule

from . import reference

LEAD, ROWS, SIZE, COLUMNS = (2, 3), 5, 256, 7
Array = reference.Array


def numbers(dtype: str, size: int = SIZE) -> tuple[Array, Array, Array]:
    """a [2, 3, 5, size], b [3, size, 7] without the first axis of a, and a gradient [2, 3, 5, 7]."""
    random = np.random.default_rng(11)
    shapes = ((*LEAD, ROWS, size), (LEAD[1], size, COLUMNS), (*LEAD, ROWS, COLUMNS))
    a, b, grad = (reference.ROUNDINGS[dtype](random.normal(size=shape).astype(np.float32)) for shape in shapes)
    return a, b, grad


def tensor(x: Array, dtype: str, grad: bool = False) -> torch.Tensor:
    return torch.from_numpy(x.copy()).to(getattr(torch, dtype)).requires_grad_(grad)


def quantized(x: Array, qtype: str, tile: int, dtype: str, method: str = "absmax") -> tuple[Array, Array, Array]:
    """Values [..., size], scales [..., tiles] and what they stand for; the last axis is summed over."""
    values, scales, _, back = reference.quantize(x.reshape(-1, x.shape[-1]), qtype, tile, dtype, method)
    return values.reshape(x.shape), scales.reshape(*x.shape[:-1], -1), back.reshape(x.shape)


def scaled(sums: Array, left: Array, right: Array, dtype: str) -> Array:
    """Sums of codes, rounded to the scales' dtype, times the one side's scales and then the other's."""
    rounded = reference.ROUNDINGS[dtype]
    return rounded(rounded(rounded(sums) * left[..., :, None]) * right[..., None, :])


def wanted(a: Array, b: Array, qtype: str, tile: int, dtype: str, method: str = "absmax") -> Array:
    """The product of a [..., M, K] and b [..., K, N], the codes multiplied in integers."""
    left, right = (quantized(x, qtype, tile, dtype, method) for x in (a, b.swapaxes(-1, -2)))
    parts = []
    for number in range(a.shape[-1] // tile):
        part = slice(number * tile, (number + 1) * tile)
        sums = left[0][..., part].astype(np.int64) @ right[0][..., part].astype(np.int64).swapaxes(-1, -2)
        parts.append(scaled(sums.astype(np.float32), left[1][..., number], right[1][..., number], dtype))
    return reference.ROUNDINGS[dtype](sum(parts[1:], start=parts[0]))


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("qtype", ["int8", "int4", "int6", "int16"])
def test_integers_are_multiplied_exactly(qtype: str, dtype: str, size: int) -> None:
    a, b, _ = numbers(dtype, size)
    done = product(tensor(a, dtype), tensor(b, dtype), QuantizationRule(op_names=("matmul",), act_qtype=qtype))
    assert done.dtype == getattr(torch, dtype)
    assert np.array_equal(done.float().numpy(), wanted(a, b, qtype, size, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles(dtype: str) -> None:
    a, b, _ = numbers(dtype)
    rule = QuantizationRule(op_names=("matmul",), act_qtype="int8", tile_size=128)
    done = product(tensor(a, dtype), tensor(b, dtype), rule)
    assert np.array_equal(done.float().numpy(), wanted(a, b, "int8", 128, dtype))


@pytest.mark.parametrize(
    ("qtype", "tile", "method"),
    [("nf4", 32, "absmax"), ("int8", 32, "absmax"), ("int8", 64, "minmax"), ("mxfp8", 32, "absmax")],
)
def test_small_tiles_are_dequantized_first(qtype: str, tile: int, method: str) -> None:
    a, b, _ = numbers("float32")
    rule = QuantizationRule(op_names=("bmm",), act_qtype=qtype, tile_size=tile, act_calibration_method=method)
    done = product(tensor(a, "float32"), tensor(b, "float32"), rule).numpy()
    left, right = (quantized(x, qtype, tile, "float32", method)[2] for x in (a, b.swapaxes(-1, -2)))
    assert np.allclose(done, left.astype(np.float64) @ right.swapaxes(-1, -2).astype(np.float64), atol=2e-5)


@pytest.mark.parametrize("qtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8(qtype: str) -> None:
    a, b, _ = numbers("float32")
    done = product(tensor(a, "float32"), tensor(b, "float32"), QuantizationRule(op_names=("bmm",), act_qtype=qtype))
    left, right = (quantized(x, qtype, SIZE, "float32") for x in (a, b.swapaxes(-1, -2)))
    sums = (left[0].astype(np.float64) @ right[0].swapaxes(-1, -2).astype(np.float64)).astype(np.float32)
    assert np.allclose(done.numpy(), scaled(sums, left[1][..., 0], right[1][..., 0], "float32"), rtol=1e-5, atol=1e-5)


def test_float16_in_float32_scales() -> None:
    a, b, _ = numbers("float32", 64)
    a, b = ((x * 0.01).astype(np.float16).astype(np.float32) for x in (a, b))
    done = product(tensor(a, "float16"), tensor(b, "float16"), QuantizationRule(op_names=("bmm",), act_qtype="int8"))
    assert done.dtype == torch.float16
    assert np.array_equal(done.float().numpy(), wanted(a, b, "int8", 64, "float32").astype(np.float16))


@pytest.mark.parametrize("sizes", [(2, 3, 4), (2, 2000, 4), (40, 64, 64), (40, 2000, 64)])
@pytest.mark.parametrize("qtype", ["int8", "int16"])
def test_every_way_to_multiply_codes_is_exact(qtype: str, sizes: tuple[int, int, int]) -> None:
    """Small matrices at once, large ones by themselves: with the largest codes there are."""
    rows, size, columns = sizes
    a, b = torch.full((2, rows, size), -1.0), torch.full((2, size, columns), -1.0)
    a[..., ::3], b[:, ::2] = 1.0, 0.5
    how = HowToQuantize(qtype=qtype, calibration_method="fixed,1")
    left, right = quantize(a, how), quantize(b, how)
    exact = left.qvalue.double() @ right.qvalue.double()
    assert torch.equal(multiply(left, right), exact.float() * left.scale * right.scale)


@pytest.mark.parametrize("tile", [None, 128])
@pytest.mark.parametrize("side", [0, 1])
def test_a_zero_point_on_one_side(side: int, tile: int | None) -> None:
    a, b, _ = numbers("float32")
    methods = ["absmax", "absmax"]
    methods[side] = "minmax"
    left, right = (
        quantize(
            tensor(x + 0.4, "float32"),
            HowToQuantize(
                qtype="int8",
                channelwise_axes=tuple(n for n in range(x.ndim) if n != x.ndim + axis),
                tiled_axes={x.ndim + axis: tile} if tile else {},
                calibration_method=method,
            ),
        )
        for x, axis, method in ((a, -1, methods[0]), (b, -2, methods[1]))
    )
    exact = dequantize(left).double() @ dequantize(right).double()
    assert (multiply(left, right) - exact).abs().max() < 1e-4


def test_zero_points_on_both_sides_are_refused() -> None:
    a, b, _ = numbers("float32")
    rule = QuantizationRule(op_names=("sdpa",), act_qtype="int8", act_calibration_method="minmax")
    with pytest.raises(SettingsError, match=r"sdpa.*both operands a zero point.*absmax"):
        product(tensor(a, "float32"), tensor(b, "float32"), rule)
    shared = QuantizationRule(op_names=("sdpa",), act_qtype="int8", act_calibration_method="minmax", tile_size=1.0)
    with pytest.raises(SettingsError, match=r"both have a zero point"):
        product(tensor(a, "float32"), tensor(b, "float32"), shared)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (QuantizationRule(op_names=("sdpa",)), "no act_qtype"),
        (QuantizationRule(module_path="attn", act_qtype="int8", act_static_scale=True), "'attn'.*act_static_scale"),
    ],
)
def test_what_products_cannot_do_is_refused(rule: QuantizationRule, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        product(torch.ones(2, 2), torch.ones(2, 2), rule)


@pytest.mark.parametrize("method", ["absmax", "absmax,0.5", "rms,1", "fixed,-1,1"])
def test_gradients_straight_through(method: str) -> None:
    """Those of the float product, and none where a number lies outside of its range."""
    a, b, grad = numbers("float32")
    left, right = tensor(a, "float32", True), tensor(b, "float32", True)
    rule = QuantizationRule(op_names=("matmul",), act_qtype="int8", act_calibration_method=method)
    product(left, right, rule).backward(torch.from_numpy(grad))
    inside_a, inside_b = np.ones_like(a), np.ones_like(b)
    for x, inside, axis in ((a, inside_a, -1), (b, inside_b, -2)):
        bound = {
            "absmax": np.abs(x).max(axis, keepdims=True),
            "absmax,0.5": np.abs(x).max(axis, keepdims=True) * np.float32(0.5),
            "rms,1": np.sqrt((x.astype(np.float64) ** 2).mean(axis, keepdims=True)),
            "fixed,-1,1": np.ones(1),
        }[method]
        inside[:] = np.abs(x) <= bound
    of_a = grad @ b.swapaxes(-1, -2) * inside_a
    of_b = (a.swapaxes(-1, -2) @ grad).sum(0) * inside_b
    assert left.grad is not None and right.grad is not None
    assert np.allclose(left.grad.numpy(), of_a, atol=1e-4) and np.allclose(right.grad.numpy(), of_b, atol=1e-4)
    assert method == "absmax" or 0.1 < 1 - inside_a.mean() < 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_in_integers(dtype: str) -> None:
    """The gradient times the other operand's scales, quantized, times its codes."""
    a, b, grad = numbers(dtype)
    rounded = reference.ROUNDINGS[dtype]
    b = np.broadcast_to(b, (LEAD[0], *b.shape)).copy()
    left, right = tensor(a, dtype, True), tensor(b, dtype, True)
    rule = QtRule(op_names=("matmul",), act_qtype="int8", bwd_qtype="int8", bwd_calibration_method="absmax,0.8")
    product(left, right, rule).backward(tensor(grad, dtype))
    assert left.grad is not None and right.grad is not None
    for made, g, other in ((left.grad, grad, b.swapaxes(-1, -2)), (right.grad.mT, grad.swapaxes(-1, -2), a)):
        codes, scales, _ = quantized(other, "int8", SIZE, dtype)
        weighed = rounded(g * scales[..., 0][..., None, :])
        values, steps, _ = quantized(weighed, "int8", g.shape[-1], dtype, "absmax,0.8")
        sums = (values.astype(np.int64) @ codes.astype(np.int64)).astype(np.float32)
        assert np.array_equal(made.float().numpy(), rounded(rounded(sums) * steps))


@pytest.mark.parametrize("kind", ["uniform", "low_bit_uniform"])
def test_gradients_rounded_at_random_are_right_on_average(kind: str) -> None:
    """Rounded to the nearest, a gradient of a few bits is off by the same amount each time."""
    a, b, grad = numbers("float32")
    b = np.broadcast_to(b, (LEAD[0], *b.shape)).copy()
    found: dict[str | None, list[tuple[Array, Array]]] = {None: [], kind: []}
    torch.manual_seed(4)
    for rounding, runs in ((None, 1), (kind, 300)):
        rule = QtRule(
            op_names=("matmul",),
            act_qtype="int16",
            bwd_qtype="int3",
            bwd_calibration_method="absmax,1.5",  # so that nothing saturates
            bwd_stochastic_rounding=rounding,
            channelwise_noise_axes=(0, 1, 2, 3),
        )
        left, right = tensor(a, "float32", True), tensor(b, "float32", True)
        done = product(left, right, rule)
        for _ in range(runs):
            made = torch.autograd.grad(done, (left, right), torch.from_numpy(grad), retain_graph=True)
            found[rounding].append((made[0].numpy(), made[1].numpy()))
    exact = (grad @ b.swapaxes(-1, -2), a.swapaxes(-1, -2) @ grad)
    for number, whole in enumerate(exact):
        once, often = (
            np.abs(np.mean([run[number] for run in found[rounding]], 0) - whole).mean() for rounding in (None, kind)
        )
        assert often < 0.2 * once
    assert not np.array_equal(found[kind][0][0], found[kind][1][0])


def test_gradients_where_codes_are_in_tiles() -> None:
    """The tiles lie across the backward sum: the float operand takes part."""
    a, b, grad = numbers("float32")
    left = tensor(a, "float32", True)
    rule = QtRule(op_names=("matmul",), act_qtype="int8", bwd_qtype="int8", tile_size=128)
    product(left, tensor(b, "float32"), rule).backward(torch.from_numpy(grad))
    back = quantized(grad, "int8", COLUMNS, "float32")[2]
    assert left.grad is not None
    assert np.allclose(left.grad.numpy(), back @ b.swapaxes(-1, -2), atol=1e-4)


def test_one_scale_for_a_tensor() -> None:
    a, b, _ = numbers("float32")
    rule = QtRule(op_names=("matmul",), act_qtype="int8", disable_channelwise_axes=True)
    codes = [np.clip(np.rint(x / (np.abs(x).max() / np.float32(127.5))), -128, 127).astype(np.int64) for x in (a, b)]
    scales = [np.abs(x).max() / np.float32(127.5) for x in (a, b)]
    exact = (codes[0] @ codes[1]).astype(np.float32) * scales[0] * scales[1]
    assert np.array_equal(product(tensor(a, "float32"), tensor(b, "float32"), rule).numpy(), exact)


def test_ranges_can_be_collected_and_given() -> None:
    """Where statistics for static ranges go: names of operands, ranges shaped like their scales."""
    a, b, _ = numbers("float32")
    seen: dict[str, tuple[int, ...]] = {}

    def collect(name: str, found: Found, axis: int) -> Found:
        seen[name] = tuple(found["absmax"].shape)
        assert axis == (-1 if name.endswith("lhs") else -2)
        return {"absmax": torch.full_like(found["absmax"], 2.0)}

    rule = QuantizationRule(op_names=("matmul",), act_qtype="int8", act_static_scale=True)
    done = product(tensor(a, "float32"), tensor(b, "float32"), Site(rule=rule, name="einsum4", collect=collect))
    assert seen == {"einsum4_lhs": (*LEAD, ROWS, 1), "einsum4_rhs": (LEAD[1], 1, COLUMNS)}
    fixed = QuantizationRule(op_names=("matmul",), act_qtype="int8", act_calibration_method="fixed,2")
    assert torch.equal(done, product(tensor(a, "float32"), tensor(b, "float32"), fixed))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bqhd,bkhd->bhqk", ((2, 5, 3, 16), (2, 7, 3, 16))),
        ("bhqk,bkhd->bqhd", ((2, 3, 5, 7), (2, 7, 3, 16))),
        ("b i d, b j d -> b i j", ((2, 5, 16), (2, 7, 16))),
        ("...ij,...jk", ((2, 3, 5, 4), (3, 4, 6))),
        ("ijk,kjl->li", ((5, 4, 3), (3, 4, 6))),
        ("i,i->", ((9,), (9,))),
    ],
)
def test_einsum_is_the_same_product(equation: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """int16 is exact enough to see that the axes are in their places."""
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    done = einsum(equation, a, b, Site(rule=QuantizationRule(op_names=("einsum",), act_qtype="int16")))
    exact = torch.einsum(equation, a, b)
    assert done is not None and done.shape == exact.shape
    assert torch.allclose(done, exact, atol=2e-3) and not torch.equal(done, exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("equation", "axes"),
    [("...ij,...jk->...ik", (0, 1, 2, 3)), ("...ij,...jk->...ki", (0, 1, 3, 2)), ("bhij,hjk->bihk", (0, 2, 1, 3))],
)
def test_einsum_scales_by_the_right_operand_first(equation: str, axes: tuple[int, ...], dtype: str) -> None:
    """As Qwix does, whose einsum multiplies the operands in the order (1, 0) that opt_einsum gives for any equation. A
    product by its other names is scaled by the left one first: the two differ in the last bit here and there."""
    a, b, _ = numbers(dtype)
    left, right = (quantized(x, "int8", SIZE, dtype) for x in (a, b.swapaxes(-1, -2)))
    sums = left[0].astype(np.int64) @ right[0].astype(np.int64).swapaxes(-1, -2)
    rounded = reference.ROUNDINGS[dtype]
    wide = rounded(sums.astype(np.float32))
    theirs = rounded(rounded(wide * right[1].swapaxes(-1, -2)) * left[1])
    rule = QuantizationRule(op_names=("einsum", "matmul"), act_qtype="int8")
    done = einsum(equation, tensor(a, dtype), tensor(b, dtype), Site(rule=rule, name="einsum0"))
    assert done is not None and np.array_equal(done.float().numpy(), theirs.transpose(axes))
    other = product(tensor(a, dtype), tensor(b, dtype), Site(rule=rule, name="dot_general0"))
    assert np.array_equal(other.float().numpy(), scaled(wide, left[1][..., 0], right[1][..., 0], dtype))
    assert not np.array_equal(other.float().numpy(), theirs)


def test_einsum_that_is_no_product() -> None:
    site = Site(rule=QuantizationRule(op_names=("einsum",), act_qtype="int8", tile_size=2))
    assert einsum("i,j->ij", torch.ones(2), torch.ones(3), site) is None
    for equation, shapes in (("ii,ij->j", ((2, 2), (2, 3))), ("ij,jk->i", ((2, 3), (3, 4))), ("ij,jk", ((2,), (2, 2)))):
        with pytest.raises(SettingsError, match="not a product of two matrices"):
            einsum(equation, *(torch.ones(shape) for shape in shapes), site)
    with pytest.raises(SettingsError, match="sums over 2 axes"):
        einsum("ijk,jkl->il", torch.ones(2, 2, 2), torch.ones(2, 2, 2), site)

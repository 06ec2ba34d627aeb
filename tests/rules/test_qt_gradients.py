"""Products and gradients of quantized training, against Qwix's formulas in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sdquant.errors import SettingsError
from sdquant.rules.core.qtypes import QTYPES
from sdquant.rules.qconfig import QtRule
from sdquant.rules.qt import QtProvider

from . import reference, reference_qt

# Sums are rounded once in each dtype (and partial ones where tiles or shards are added).
ERRORS = {"float32": 2e-6, "bfloat16": 1.2e-2}
INT8 = {"weight_qtype": "int8", "act_qtype": "int8"}
METHODS = ("absmax,0.5", "absmax,1.2", "minmax", "minmax,0.7", "rms,2", "fixed,-0.5,0.5", "fixed,-0.4,0.8")
BACKWARD = (None, "int8", "float8_e5m2")

TYPES = [
    {"weight_qtype": row.name, "act_qtype": act, "bwd_qtype": back, "tile_size": row.tile}
    for row in QTYPES
    for act in (None, row.name)
    for back in BACKWARD
]
OTHERS = [
    *({**INT8, "bwd_qtype": row.name} for row in QTYPES if row.tile is None),
    {"weight_qtype": "int4", "act_qtype": "int8", "bwd_qtype": "int8"},
    {"weight_qtype": "int8", "act_qtype": "float8_e4m3fn", "bwd_qtype": "int8"},
    *({**INT8, "bwd_qtype": back, side: method} for back in BACKWARD for side in
      ("weight_calibration_method", "act_calibration_method") for method in METHODS),
    *({**INT8, "bwd_qtype": "int8", "bwd_calibration_method": method} for method in METHODS),
    {**INT8, "act_calibration_method": "minmax", "bwd_calibration_method": "minmax", "bwd_qtype": "int8"},
    *({**INT8, "bwd_qtype": back, "disable_channelwise_axes": True} for back in BACKWARD),
    *({**INT8, "bwd_qtype": "int8", "bwd_weight_grad_shards": count} for count in (0, 1, 2)),
]  # fmt: skip
LINEAR = [
    *({**INT8, "bwd_qtype": back, "tile_size": tile} for back in BACKWARD for tile in (64, 128, 256)),
    {**INT8, "tile_size": 128, "weight_calibration_method": "absmax,0.5", "act_calibration_method": "rms,2"},
    *({**INT8, "bwd_qtype": "int8", "bwd_weight_grad_tile_size": tile} for tile in (2, 4)),
]
CONVOLUTIONS: list[dict[str, Any]] = [
    {"padding": 1},
    {"stride": 2, "padding": (1, 0), "dilation": (1, 2)},
    {"stride": 2, "padding": 3, "groups": 2},
    {"padding": "same", "dilation": (1, 2)},
]


def label(rule: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in rule.items() if value is not None)


def run(
    module: nn.Module, rule: dict[str, Any], x: reference.Array, g: reference.Array, dtype: str
) -> list[reference.Array]:
    """The layer's result and gradients, without those of the bias."""
    layer = QtProvider([]).layer(module.to(getattr(torch, dtype)), QtRule(**rule), "a.layer")
    into = torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_()
    y = layer(into)
    y.backward(torch.from_numpy(g).to(y.dtype).reshape(y.shape))
    weight = layer.get_parameter("weight").grad
    assert into.grad is not None and weight is not None
    assert {y.dtype, into.grad.dtype, weight.dtype} == {getattr(torch, dtype)}
    return [one.detach().float().numpy() for one in (y, into.grad, weight)]


def compare(made: list[reference.Array], wanted: tuple[reference_qt.Wide, ...], dtype: str) -> None:
    for name, ours, theirs in zip(("y", "dx", "dw"), made, wanted, strict=True):
        error = np.abs(ours - theirs.reshape(ours.shape)).max() / np.abs(theirs).max()
        assert error < ERRORS[dtype], (name, error)


def numbers(seed: int, *shapes: tuple[int, ...], dtype: str) -> list[reference.Array]:
    random = np.random.default_rng(seed)
    return [reference.ROUNDINGS[dtype](random.normal(size=shape).astype(np.float32)) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", [*TYPES, *OTHERS, *LINEAR], ids=label)
def test_linear(rule: dict[str, Any], dtype: str) -> None:
    rows, size, outs = 8, 256, 4
    x, w, g = numbers(1, (rows, size), (outs, size), (rows, outs), dtype=dtype)
    module = nn.Linear(size, outs, bias=False)
    module.weight.data = torch.from_numpy(w)
    compare(run(module, rule, x, g, dtype), reference_qt.linear(x, w, g, rule, dtype), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", [row for row in (*TYPES, *OTHERS) if row.get("tile_size") is None], ids=label)
def test_conv(rule: dict[str, Any], dtype: str) -> None:
    check_conv(rule, CONVOLUTIONS[0], dtype)


@pytest.mark.parametrize("how", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("back", BACKWARD)
@pytest.mark.parametrize("qtypes", [("int8", "int8"), ("int4", None), ("int8", "int4"), ("float8_e4m3fn",) * 2])
def test_windows(qtypes: tuple[str, str | None], back: str | None, how: dict[str, Any]) -> None:
    check_conv({"weight_qtype": qtypes[0], "act_qtype": qtypes[1], "bwd_qtype": back}, how, "float32")


def check_conv(rule: dict[str, Any], how: dict[str, Any], dtype: str) -> None:
    groups = how.get("groups", 1)
    x, w = numbers(2, (2, 4, 6, 5), (4, 4 // groups, 3, 2), dtype=dtype)
    (g,) = numbers(3, reference_qt.products(x, w, how).shape, dtype=dtype)
    module = nn.Conv2d(4, 4, (3, 2), bias=False, **how)
    module.weight.data = torch.from_numpy(w)
    compare(run(module, rule, x, g, dtype), reference_qt.convolution(x, w, g, rule, dtype, how), dtype)


@pytest.mark.parametrize("kind", ["1d", "3d"])
def test_other_numbers_of_axes(kind: str) -> None:
    how = {"padding": 1, "stride": 2}
    rest, kernel = ((9,), (3,)) if kind == "1d" else ((5, 4, 4), (3, 2, 2))
    x, w = numbers(4, (2, 4, *rest), (6, 4, *kernel), dtype="float32")
    (g,) = numbers(5, reference_qt.products(x, w, how).shape, dtype="float32")
    module = (nn.Conv1d if kind == "1d" else nn.Conv3d)(4, 6, kernel, bias=False, **how)  # type: ignore[arg-type]
    module.weight.data = torch.from_numpy(w)
    rule = {**INT8, "bwd_qtype": "int8"}
    compare(run(module, rule, x, g, "float32"), reference_qt.convolution(x, w, g, rule, "float32", how), "float32")


def test_tiles_of_the_weights_gradient_lie_along_tokens() -> None:
    """Of an input [batch, tokens, in] a tile has the same tokens of every sample; a shard has whole samples."""
    x, w, g = numbers(6, (4, 6, 32), (5, 32), (4, 6, 5), dtype="float32")
    module = nn.Linear(32, 5, bias=False)
    module.weight.data = torch.from_numpy(w)
    by_token = [np.ascontiguousarray(one.swapaxes(0, 1)).reshape(24, -1) for one in (x, g)]
    for extra, rows, field, count in (
        ({"bwd_weight_grad_tile_size": 2}, by_token, "bwd_weight_grad_tile_size", 8),
        ({"bwd_weight_grad_tile_size": 1 / 3}, by_token, "bwd_weight_grad_tile_size", 8),
        ({"bwd_weight_grad_shards": 2}, [x.reshape(24, -1), g.reshape(24, -1)], "bwd_weight_grad_shards", 2),
    ):
        rule = {**INT8, "bwd_qtype": "int8"}
        made = run(module, rule | extra, x, g, "float32")[2]
        wanted = reference_qt.linear(rows[0], w, rows[1], rule | {field: count}, "float32")[2]
        assert np.abs(made - wanted).max() < 2e-6 * np.abs(wanted).max()
        module.weight.grad = None


@pytest.mark.parametrize("module", [nn.Linear(4, 3), nn.Conv2d(4, 3, 1)], ids=["linear", "conv"])
def test_shards_that_do_not_divide_the_batch(module: nn.Module) -> None:
    layer = QtProvider([]).layer(module, QtRule(**INT8, bwd_qtype="int8", bwd_weight_grad_shards=2), "a")
    x = torch.ones(3, 4) if isinstance(module, nn.Linear) else torch.ones(3, 4, 2, 2)
    with pytest.raises(SettingsError, match="not a multiple"):
        layer(x).sum().backward()


@pytest.mark.parametrize("kind", ["uniform", "low_bit_uniform"])
@pytest.mark.parametrize("axes", [(0,), (0, 1), (1,)])
def test_stochastic_rounding(kind: str, axes: tuple[int, ...]) -> None:
    """It is right on average, the same along the other axes, and repeats with the seed."""
    weight = torch.eye(64)
    module = nn.Linear(64, 64, bias=False)
    module.weight.data = weight
    rule = {"weight_qtype": "int8", "bwd_qtype": "int4", "bwd_stochastic_rounding": kind}
    layer = QtProvider([]).layer(module, QtRule(**rule, channelwise_noise_axes=axes), "a")
    g = torch.full((2000, 64), 0.3)
    g[:, 0] = 1.0

    def gradient(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        x = torch.zeros(2000, 64, requires_grad=True)
        layer(x).backward(g)
        assert x.grad is not None
        return x.grad[:, 1:]

    made = gradient(0)
    assert torch.equal(made, gradient(0)) and not torch.equal(made, gradient(1))
    assert (made[:, 1:] == made[:, :1]).all() == (1 not in axes)
    assert (made[1:] == made[:1]).all() == (0 not in axes)
    if 0 in axes:  # the same draw for all rows says nothing about the mean
        assert abs(made.mean() - 0.3) < 0.02
    else:
        assert len(made.unique()) > 1


def test_a_generator_of_ones_own() -> None:
    layer = QtProvider([]).layer(
        nn.Conv1d(4, 4, 1), QtRule(**INT8, bwd_qtype="int8", bwd_stochastic_rounding="uniform"), "a"
    )
    g = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))

    def gradient() -> torch.Tensor:
        x = torch.ones(3, 4, 5, requires_grad=True)
        layer.generator = torch.Generator().manual_seed(7)
        layer(x).backward(g)
        assert x.grad is not None
        return x.grad

    first = gradient()
    torch.manual_seed(123)
    assert torch.equal(gradient(), first)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({"weight_qtype": None}, "no weight_qtype"),
        ({"weight_qtype": "int8", "tile_size": 48}, "tiles of 48 do not divide"),
        ({"weight_qtype": "int8", "bwd_qtype": "mxfp4"}, "mxfp4 needs tiles"),
        ({"weight_qtype": "int8", "bwd_qtype": "float8_e5m2", "bwd_calibration_method": "minmax"}, "no zero point"),
    ],
    ids=str,
)
def test_refused_before_it_runs(rule: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=f"a[.]layer.*{why}"):
        QtProvider([]).layer(nn.Linear(64, 4), QtRule(**rule), "a.layer")


def test_an_input_of_a_convolution_has_no_tiles() -> None:
    rule = QtRule(weight_qtype="int8", act_qtype="mxfp8", tile_size=32)
    with pytest.raises(SettingsError, match="mxfp8 needs tiles"):
        QtProvider([]).layer(nn.Conv2d(64, 4, 1), rule, "a")

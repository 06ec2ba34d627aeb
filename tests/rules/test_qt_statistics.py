"""Ranges of activations over batches: what is summed, when it is used, and that no order changes a bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sdquant.errors import SettingsError
from sdquant.rules.core.dot_general import linear
from sdquant.rules.core.qarray import HowToQuantize, quantize
from sdquant.rules.core.static_range import static_range
from sdquant.rules.model_quantization import quantize_model
from sdquant.rules.providers.ptq import PtqProvider
from sdquant.rules.qconfig import QtRule
from sdquant.rules.qt import QtProvider, collecting, load_quant_stats, merge_quant_stats, quant_stats

STATIC = {"weight_qtype": "int8", "act_qtype": "int8", "act_static_scale": True}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.conv(x).flatten(2).mT
        result: Tensor = self.second(torch.nn.functional.gelu(self.first(made)))
        return result


def model(**extra: Any) -> nn.Module:
    made: nn.Module = quantize_model(Small(), QtProvider([{**STATIC, **extra}]))
    return made


def batches(count: int = 8) -> list[Tensor]:
    """Of very different sizes, so that sums of float32 depend on their order."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, 3, 4 + n % 2, 5, generator=generator) * 10.0 ** (n % 5 * 2 - 4) for n in range(count)
    ]  # fmt: skip


def collect(into: nn.Module, of: list[Tensor], **keywords: bool) -> dict[str, Tensor]:
    with torch.no_grad(), collecting(into, **keywords):
        for batch in of:
            into(batch)
    return quant_stats(into, exact=True)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_names_shapes_and_sums() -> None:
    made = model()
    of = batches()
    stats = collect(made, of)
    plain = quant_stats(made)
    assert sorted(plain) == [
        f"{name}_lhs.{what}"
        for name in ("conv.conv_general_dilated0", "first.dot_general0", "second.dot_general0")
        for what in ("count", "sum_of_absmax")
    ]
    assert all(torch.equal(stats[name], value) for name, value in plain.items())
    count = plain["conv.conv_general_dilated0_lhs.count"]
    assert count.dtype == torch.int32 and count.shape == () and int(count) == 8
    assert plain["conv.conv_general_dilated0_lhs.sum_of_absmax"].shape == (1, 1, 1, 1)
    assert plain["first.dot_general0_lhs.sum_of_absmax"].shape == (1, 1, 1)
    # Of a batch: the mean of its samples' largest magnitudes. fsum adds without rounding.
    means = [
        float(np.float32(np.abs(x.numpy()).reshape(2, -1).max(1).astype(np.float64).mean())) for x in of
    ]  # fmt: skip
    wanted = np.float32(math.fsum(means))
    assert plain["conv.conv_general_dilated0_lhs.sum_of_absmax"].item() == wanted


@pytest.mark.parametrize("method", ["absmax", "minmax", "absmax,0.9", "rms,3", "fixed,-3,3"])
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_any_number_of_processes_gives_the_same_bits(processes: int, method: str) -> None:
    of = batches()
    alone = collect(model(act_calibration_method=method), of, own_ranges=True)
    parts = [
        collect(model(act_calibration_method=method), of[rank::processes], own_ranges=True) for rank in range(processes)
    ]
    assert same(merge_quant_stats(parts), alone)
    assert same(merge_quant_stats(parts[::-1]), alone)
    # Stopped and begun again:
    again = model(act_calibration_method=method)
    load_quant_stats(again, parts[0])
    rest = [batch for number, batch in enumerate(of) if number % processes]
    assert same(collect(again, rest, own_ranges=True), alone)


def test_sums_of_float32_would_depend_on_their_order() -> None:
    """So the test before this one says something."""
    of = np.array([np.abs(x.numpy()).reshape(2, -1).max(1).mean() for x in batches()], np.float32)
    random = np.random.default_rng(0)
    sums = {float(np.add.accumulate(random.permutation(of))[-1]) for _ in range(20)}
    assert len(sums) > 1


def test_the_range_of_a_batch_is_the_mean_so_far() -> None:
    layer = QtProvider([]).layer(nn.Linear(4, 4, bias=False), QtRule(**STATIC), "a")
    layer.get_parameter("weight").data = torch.eye(4)
    first, second = torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([[4.0, 0, 0, 0]])

    def largest(x: Tensor) -> float:
        with torch.no_grad():
            return float(layer(x)[0, 0])

    assert largest(second) == pytest.approx(4 * 127 / 127.5 * 127 / 127.5)  # nothing collected: its own range
    with collecting(layer):
        assert largest(first) == pytest.approx(1 * (127 / 127.5) ** 2)
        assert largest(second) == pytest.approx(2.5 * (127 / 127.5) ** 2)  # the mean of 1 and 4, itself included
    assert largest(second) == pytest.approx(2.5 * (127 / 127.5) ** 2)
    stats = quant_stats(layer)
    assert largest(100 * second) == pytest.approx(2.5 * (127 / 127.5) ** 2)
    assert same(stats, quant_stats(layer))  # not collecting any more
    with collecting(layer, own_ranges=True):
        assert largest(100 * second) == pytest.approx(400 * (127 / 127.5) ** 2)
    assert int(quant_stats(layer)["a.dot_general0_lhs.count"]) == 3


@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_trained_with_static_ranges_is_what_is_run_with_them(method: str) -> None:
    """The model that calibrates and the quantized one made with its statistics: the same bits."""
    rules = [{**STATIC, "act_calibration_method": method}]
    made = quantize_model(Small(), QtProvider(rules))
    collect(made, batches())
    run = quantize_model(Small(), PtqProvider(rules, quant_stats(made)))
    x = batches()[2]
    with torch.no_grad():
        assert torch.equal(made(x), run(x))


def test_a_scale_of_the_mean() -> None:
    made = model()
    stats = collect(made, batches())
    found = static_range(stats, "first", "linear", QtRule(**STATIC))
    mean = stats["first.dot_general0_lhs.sum_of_absmax"].numpy() / np.float32(8)
    assert found.scale.item() == mean.item() / np.float32(127.5) and found.zero_point is None
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    weight = made.get_parameter("first.weight")
    wanted = linear(
        quantize(x, HowToQuantize(qtype="int8", calibration_method=f"fixed,{mean.item()!r}")),
        quantize(weight, HowToQuantize(qtype="int8", channelwise_axes=(0,))),
    )
    assert torch.equal(made.get_submodule("first")(x), wanted + made.get_parameter("first.bias"))


def test_axes_that_are_kept_have_to_keep_their_size() -> None:
    layer = QtProvider([]).layer(nn.Linear(8, 4), QtRule(**STATIC, act_batch_axes=(0,)), "block.to_q")
    with collecting(layer):
        layer(torch.randn(2, 5, 8))
        assert quant_stats(layer)["block.to_q.dot_general0_lhs.sum_of_absmax"].shape == (1, 5, 1)
        with pytest.raises(SettingsError, match=r"block[.]to_q.*act_batch_axes"):
            layer(torch.randn(2, 6, 8))
    with pytest.raises(SettingsError, match="input of 1 axes"):
        layer(torch.randn(8))


def test_tiles_have_ranges_of_their_own() -> None:
    layer = QtProvider([]).layer(nn.Linear(8, 4), QtRule(**STATIC, tile_size=4), "a")
    x = torch.arange(16.0).reshape(2, 8)
    with collecting(layer):
        layer(x)
        layer(x.reshape(1, 2, 8))  # another number of axes, the same ranges
    assert quant_stats(layer)["a.dot_general0_lhs.sum_of_absmax"].tolist() == [[2 * (3 + 11) / 2, 2 * (7 + 15) / 2]]


@pytest.mark.parametrize("what", ["not finite", "nothing static", "unknown layer", "other shapes", "axes"])
def test_refused(what: str) -> None:
    layer = QtProvider([]).layer(nn.Linear(8, 4), QtRule(**STATIC, tile_size=4), "a")
    if what == "not finite":
        with collecting(layer), pytest.raises(SettingsError, match="not finite"):
            layer(torch.full((1, 8), torch.inf))
    elif what == "nothing static":
        with pytest.raises(SettingsError, match="act_static_scale"), collecting(nn.Linear(2, 2)):
            pass
    elif what == "unknown layer":
        with pytest.raises(SettingsError, match="no such layer"):
            load_quant_stats(layer, {"b.dot_general0_lhs.count": torch.tensor(1)})
    elif what == "axes":
        far = QtProvider([]).layer(nn.Linear(8, 4), QtRule(**STATIC, act_batch_axes=(5,)), "a")
        with pytest.raises(SettingsError, match="act_batch_axes"):
            far(torch.ones(1, 8))
    else:
        other = QtProvider([]).layer(nn.Linear(8, 4), QtRule(**STATIC), "a")
        parts = [collect(one, [torch.ones(1, 8)]) for one in (layer, other)]
        with pytest.raises(SettingsError, match="several processes"):
            merge_quant_stats(parts)

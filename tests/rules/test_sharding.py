"""Ranges of weights found in parts: the same bits as found at once, for every type and method, in one process.
Several processes: tests/test_distributed.py."""

from __future__ import annotations

import threading

import pytest
import torch

from sdquant import demo, load_model
from sdquant.errors import SettingsError
from sdquant.rules import QuantizationRule
from sdquant.rules.core.how_to_quantize import HowToQuantize
from sdquant.rules.core.qarray import range_of
from sdquant.rules.core.qtypes import QTYPES
from sdquant.rules.core.sharding import range_of_weight, sharded
from sdquant.rules.packed_qarray import encode

_SHAPES = ((10, 64), (7, 32, 3, 3), (1, 64), (3, 32, 1))
_TILES = {32: 32, 16: 16, None: 8}


def _weight(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64) - 0.3
    made[0] = made[0].abs()  # a row with no number below zero
    made[-1, 1] = 0
    return made.to(dtype)


@pytest.mark.parametrize("count", [2, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_parts_have_the_range_of_the_whole(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
    weight = _weight(shape, dtype)
    for method in ("absmax", "minmax", "absmax,0.9", "minmax,0.7", "rms,3", "fixed,-1,2"):
        for axes, tiles in (((0,), {}), ((), {}), ((0,), {1: 16}), ((1,), {0: 1.0}), ((), {0: 1, 1: 0.5})):
            how = HowToQuantize(qtype="int8", channelwise_axes=axes, tiled_axes=tiles, calibration_method=method)
            wanted = range_of(weight, how)
            with sharded(count):
                found = range_of_weight(weight, how)
            assert found.keys() == wanted.keys()
            for name, range in wanted.items():
                assert torch.equal(found[name], range), (method, axes, tiles, name)
                assert found[name].dtype == range.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [row.name for row in QTYPES])
def test_every_type_is_packed_to_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    row = next(row for row in QTYPES if row.name == name)
    tiles = (row.tile,) if row.tile else (None, 16)
    methods = ("absmax", "minmax") if row.asymmetric else ("absmax",)
    for shape in _SHAPES:
        for tile in tiles:
            for method in methods:
                rule = QuantizationRule(weight_qtype=name, tile_size=tile, weight_calibration_method=method)
                weight = _weight(shape, dtype)
                wanted = encode(weight, rule)
                with sharded(3):
                    made = encode(weight, rule)
                assert made.spec == wanted.spec
                for part, tensor in wanted.parts.items():
                    assert torch.equal(made.parts[part].view(torch.uint8), tensor.view(torch.uint8)), (
                        shape,
                        tile,
                        part,
                    )


def test_there_are_no_more_parts_than_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight((10, 64), torch.float32)
    how = HowToQuantize(qtype="int8", channelwise_axes=(0,))
    counts: list[int] = []
    split = torch.Tensor.tensor_split
    monkeypatch.setattr(torch.Tensor, "tensor_split", lambda x, n, dim: counts.append(n) or split(x, n, dim=dim))
    with sharded(1_000_000_000):
        found = range_of_weight(weight, how)
    assert counts == [10] and torch.equal(found["absmax"], range_of(weight, how)["absmax"])


def test_a_nan_shows_in_the_range_as_it_does_in_the_whole() -> None:
    weight = _weight((10, 64), torch.float32)
    weight[7, 5] = float("nan")
    for axes in ((0,), ()):
        how = HowToQuantize(qtype="int8", channelwise_axes=axes)
        with sharded(4):
            found = range_of_weight(weight, how)["absmax"]
        assert torch.equal(found.isnan(), range_of(weight, how)["absmax"].isnan())


def test_each_part_is_looked_at_on_its_device() -> None:
    weight, how = _weight((10, 64), torch.float32), HowToQuantize(qtype="int8", channelwise_axes=(0,))
    with sharded(3, devices=["cpu", "cpu:0"]):
        assert torch.equal(range_of_weight(weight, how)["absmax"], range_of(weight, how)["absmax"])
    # What is on the meta device has no numbers: nothing comes back from there.
    with sharded(3, devices=["cpu", "meta"]), pytest.raises(NotImplementedError, match="meta"):
        range_of_weight(weight, how)


def test_parts_are_those_of_this_thread_and_of_this_block() -> None:
    weight, how = torch.ones(4, 4), HowToQuantize(qtype="int8", channelwise_axes=(0,))
    seen = []

    def elsewhere() -> None:
        from sdquant.rules.core import sharding

        seen.append(sharding._HERE.get())

    from sdquant.rules.core import sharding

    with sharded(2):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert sharding._HERE.get() is not None
        with sharded(1):
            assert sharding._HERE.get() is None
    assert seen == [None]
    assert sharding._HERE.get() is None
    assert torch.equal(range_of_weight(weight, how)["absmax"], torch.ones(4, 1))


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_no_number_of_parts(count: object) -> None:
    with pytest.raises(SettingsError, match="parts"), sharded(count):  # type: ignore[arg-type]
        pass


def test_a_loaded_model_is_the_same() -> None:
    rules = [{"module_path": ".*attn.*", "weight_qtype": "int4", "tile_size": 16}, {"weight_qtype": "int8"}]
    wanted = load_model(demo.path("digits-sd") / "unet", rules=rules).state_dict()
    with sharded(3):
        found = load_model(demo.path("digits-sd") / "unet", rules=rules).state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name

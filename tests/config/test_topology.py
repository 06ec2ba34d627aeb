"""Slices and shards: MaxDiffusion's pyconfig.py:313-328, with nodes for slices."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sdquant.compat import hardware
from sdquant.errors import SettingsError
from sdquant.training.config import load, shards_of
from sdquant.training.config.topology import resolve, visible_accelerators

TWO_NODES = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


def never() -> int:
    raise AssertionError("asked although something else tells")


@pytest.mark.parametrize(
    ("slices", "count", "environment", "found", "parts"),
    [
        (-1, -1, TWO_NODES, 2, 2),
        (0, -1, TWO_NODES, 2, 2),
        (3, -1, TWO_NODES, 3, 3),
        (3, 5, TWO_NODES, 3, 5),
        (-1, 5, TWO_NODES, 2, 5),
        (-1, -1, {"WORLD_SIZE": "4"}, 4, 4),
        (-1, -1, {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, 1, 1),
    ],
)
def test_what_they_come_to(slices: int, count: int, environment: Mapping[str, str], found: int, parts: int) -> None:
    made = resolve(slices, count, environment=environment, accelerators=never)
    assert (made.num_slices, made.count, made.parts) == (found, parts, parts)
    assert made.of_weight_gradient == (None if parts == 1 else parts)


@pytest.mark.parametrize(("number", "slices"), [(0, 1), (1, 1), (4, 4)])
def test_accelerators_where_nothing_else_tells(number: int, slices: int) -> None:
    assert resolve(-1, -1, environment={}, accelerators=lambda: number).count == slices


def test_no_shards_leave_the_weights_gradient_as_it_is() -> None:
    made = resolve(2, 0, environment={}, accelerators=never)
    assert (made.count, made.parts, made.of_weight_gradient) == (0, 1, 0)


@pytest.mark.parametrize(
    ("slices", "count", "environment", "why"),
    [
        (-2, -1, {}, "at least -1"),
        (-1, -2, {}, "at least -1"),
        (-1, -1, {"WORLD_SIZE": "no"}, "a whole number above 0"),
        (-1, -1, {"WORLD_SIZE": "0"}, "a whole number above 0"),
        (-1, -1, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "0"}, "a whole number above 0"),
        (-1, -1, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3"}, "4 processes cannot be divided into nodes of 3"),
    ],
)
def test_what_cannot_be(slices: int, count: int, environment: Mapping[str, str], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        resolve(slices, count, environment=environment, accelerators=never)


def test_a_configs_shards(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)
    words = ["use_qwix_quantization=true", "quantization=int8", "quantization_local_shard_count=3"]
    with caplog.at_level("INFO", "sdquant"):
        made = shards_of(load(None, words))
    assert made.to_dict() == {"num_slices": 2, "found": "nodes", "count": 3}
    assert caplog.messages == ["compile_topology_num_slices: 2 (nodes); quantization_local_shard_count: 3"]


def test_the_accelerators_of_this_machine() -> None:
    assert visible_accelerators() == len(hardware.probe().devices) - 1  # the CPU is the one that is none

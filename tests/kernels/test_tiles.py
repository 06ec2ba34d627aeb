"""The sizes of tiles that are chosen for products of 8-bit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdquant.core import PackedLayout, packed_rows, registry
from sdquant.kernels import int8_reference, scheme_activations
from sdquant.kernels.triton import imports
from sdquant.kernels.triton.tiles import AMPERE, HOPPER, SPREAD, Tile, Tiles, best, tiles
from sdquant.rules import PtqProvider, QuantizationRule

H100 = 132
CPU = torch.device("cpu")
MEASURED = Path(__file__).parents[2] / "bench" / "results" / "eight-h200.json"


def programs(tile: Tile, m: int, n: int) -> int:
    return math.ceil(m / tile.rows) * math.ceil(n / tile.columns)


def test_cards() -> None:
    assert tiles((9, 0)) is HOPPER and tiles((9, 0), amd=True) is AMPERE
    assert all(tiles(card) is AMPERE for card in ((8, 0), (8, 9), (10, 0), (12, 0)))


@pytest.mark.parametrize("sizes", [HOPPER.by_row, AMPERE.by_row], ids=["hopper", "ampere"])
def test_much_work_goes_in_the_largest_tiles_and_little_to_every_processor(sizes: tuple[Tile, ...]) -> None:
    assert best(sizes, 4608, 12288, H100) is sizes[0]
    for m, n in ((256, 3072), (64, 3072)):
        tile = best(sizes, m, n, H100)
        assert programs(tile, m, n) > programs(sizes[0], m, n)
        assert programs(tile, m, n) >= 0.7 * H100


def test_on_an_h200_the_tile_chosen_is_the_fastest_that_was_measured() -> None:
    times: dict[str, dict[str, float]] = {}
    for row in json.loads(MEASURED.read_text())["rows"]:
        if row["name"].startswith(("int8 1", "int8 2", "int8 6")):
            times.setdefault(row["case"], {})[row["name"]] = row["seconds"]
    assert len(times) == 9
    for case, by_tile in times.items():
        sizes, m = case.split(" M=")
        tile = best(HOPPER.by_row, int(m), int(sizes.split("x")[1]), H100)
        name = f"int8 {tile.rows}x{tile.columns}x{tile.deep} {tile.warps}w {tile.stages}s"
        assert by_tile[name] <= 1.02 * min(by_tile.values()), case


@pytest.mark.parametrize("sizes", [HOPPER, AMPERE], ids=["hopper", "ampere"])
def test_every_tile_is_looked_at_before_products_are_used(sizes: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, only the largest and the smallest were."""
    gemm = pytest.importorskip("sdquant.kernels.triton.int8_gemm")
    seen: list[tuple[Tile, bool]] = []
    wrong: list[tuple[Tile, bool]] = []

    def by_run(device: torch.device, tile: Tile, taps: int = 1, both: bool = False) -> bool:
        seen.append((tile, both))
        return seen[-1] not in wrong

    monkeypatch.setattr(gemm, "device_tiles", lambda device: (sizes, H100))
    monkeypatch.setattr(gemm, "_multiplies_by_row", lambda case, tile: by_run(CPU, tile))
    monkeypatch.setattr(gemm, "_multiplies_by_run", by_run)
    assert gemm.sound_products(CPU)
    every = {(tile, False) for tile in (*sizes.by_row, *sizes.by_run, *SPREAD)} | {
        (tile, True) for tile in sizes.by_run
    }
    assert set(seen) == every
    for one in every:
        wrong[:] = [one]
        assert not gemm.sound_products(CPU)


@pytest.mark.parametrize("wrong", [None, 0, 1])
@pytest.mark.parametrize("tile", [None, 128])
def test_every_tile_of_a_rule_is_compared_with_the_backend(
    tile: int | None, wrong: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card; the backend itself stands for right kernels."""
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=tile)
    layer: Any = PtqProvider([]).layer(nn.Linear(256, 200, dtype=torch.bfloat16), rule, "a")
    backend, packed, seen = layer._backend, layer.packed, []
    all_sizes = HOPPER.by_tile if tile else HOPPER.by_row

    def linear(form: Any, parts: Any, how: Any, x: Tensor, bias: Tensor, size: Tile) -> Tensor:
        seen.append(size)
        assert len(x) > 128 < form.rows  # of the largest tile more than one
        y: Tensor = backend.linear(packed_rows.cut(packed, [(0, form.rows)]), x) + bias
        return y + (wrong is not None and size is all_sizes[wrong])

    kernels = SimpleNamespace(linear=linear, sizes_of=lambda how, device: all_sizes)
    monkeypatch.setattr(imports, "scheme_kernels", lambda device: kernels)
    monkeypatch.setattr(scheme_activations, "_on_cpu", lambda packed: False)
    right = scheme_activations._right(backend, packed, layer._activations, torch.bfloat16)
    assert right == (wrong is None) and (wrong is not None or set(seen) == set(all_sizes))


@pytest.mark.parametrize(("text", "width"), [("nf4", 512), ("q8_0", 256), ("mxfp8", 256)])
def test_the_width_that_is_quantized_again_is_compared(text: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a row is decides how the kernel is compiled: runs of columns are rows to it."""
    spec, seen = registry.parse(text), []
    backend = spec.scheme.codec
    packed = backend.encode(torch.randn(8, 512), spec)

    def requantization(form: PackedLayout, parts: Any, codes: Tensor, scale: Tensor) -> Any:
        seen.append((form.rows, form.columns))
        of = int8_reference.quantized_rows(backend.decode(packed, torch.float32).view(codes.shape), codes)
        return lambda device: scale.copy_(of[1].view(-1))

    kernels = SimpleNamespace(quantizes=lambda form: True, requantization=requantization)
    monkeypatch.setattr(imports, "eight", lambda device: kernels)
    monkeypatch.setattr(int8_reference, "_quantize", {})
    impl, form = int8_reference.InTriton(CPU), backend.form(packed)
    assert form is not None and impl.quantizes(backend, packed, form)
    assert seen == [(8 * 512 // width, width)]

"""The sizes of tiles that are chosen for products of 8-bit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sdquant.kernels.triton.tiles import AMPERE, HOPPER, Tile, best, tiles

H100 = 132
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

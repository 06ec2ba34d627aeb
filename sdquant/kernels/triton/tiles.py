"""Sizes of the tiles into which a product of 8-bit codes is cut. No triton."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes.

    Attributes:
        rows: of activations. columns: of results, rows of the weight. deep: columns of both that are read at once.
        warps, stages: Triton's. speed: how fast a processor that is full of such programs is, as a part of the fastest.
        together: how many programs fill a processor.
    """

    rows: int
    columns: int
    deep: int
    warps: int
    stages: int
    speed: float = 1.0
    together: float = 1.0


@dataclass(frozen=True)
class Tiles:
    """The tiles for a kind of cards, the largest first, of products with one scale per row, with one per run, and with
    one per run of the activations as well."""

    by_row: tuple[Tile, ...]
    by_run: tuple[Tile, ...]
    by_tile: tuple[Tile, ...]


RUN = 64  # what the columns of a run are a multiple of
# For tensor cores that read shared memory (Hopper's wgmma). Triton waits for each product of integers to end before it
# starts the next one, so that it takes several programs to keep a processor busy. Those with one scale per row are
# fitted to an H200: of nine sizes the one chosen is the fastest of these, and of twice as large ones
# (bench/results/eight-h200.json; tests/kernels/test_tiles.py).
HOPPER = Tiles(
    by_row=(
        Tile(128, 128, 128, 8, 3, 1.0, 1.8),
        Tile(64, 128, 128, 4, 3, 0.81, 2.6),
        Tile(64, 64, 128, 4, 4, 0.58, 2.5),
        Tile(64, 32, 128, 4, 4, 0.33, 2.5),  # reckoned: for few rows and columns
    ),
    by_run=(Tile(64, 128, 128, 4, 3), Tile(64, 64, 128, 4, 3, 0.7)),
    by_tile=(Tile(64, 128, 128, 4, 3), Tile(64, 64, 128, 4, 3, 0.7)),
)
# For those that read registers (mma.sync). Cards for desktops have 99 KB of shared memory for a processor.
AMPERE = Tiles(
    by_row=(
        Tile(128, 128, 64, 8, 4),
        Tile(64, 128, 64, 4, 4, 0.8),
        Tile(64, 64, 64, 4, 4, 0.6),
        Tile(32, 64, 128, 4, 3, 0.35),
        Tile(16, 64, 128, 4, 3, 0.18),
    ),
    by_run=(Tile(64, 128, RUN, 4, 4), Tile(64, 64, RUN, 4, 4, 0.7)),
    by_tile=(Tile(64, 128, RUN, 8, 3), Tile(64, 64, RUN, 4, 4, 0.7)),  # with 4 warps the first spills 144 bytes
)
# Runs of a convolution: single bytes far apart, each with an address of its own.
SPREAD = (Tile(64, 64, RUN, 8, 3),)
_WGMMA = (9, 0)


def tiles(capability: tuple[int, int], amd: bool = False) -> Tiles:
    """Return the tiles for a card."""
    return HOPPER if capability == _WGMMA and not amd else AMPERE


def best(sizes: tuple[Tile, ...], m: int, n: int, processors: int) -> Tile:
    """Return the tile with which the busiest processor is done first, computing a product [m, n]."""

    def seconds(tile: Tile) -> float:
        programs = math.ceil(m / tile.rows) * math.ceil(n / tile.columns)
        return max(math.ceil(programs / processors), tile.together) * tile.rows * tile.columns / tile.speed

    return min(sizes, key=seconds)

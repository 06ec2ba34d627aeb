"""The kernels' own cases on what Triton compiles of them for sm_80, run on the CPU by `tests.ptx`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("triton")

from sdquant.kernels import dispatch, int8_reference
from sdquant.kernels.triton import bound_linear, imports, int8_gemm, launch, launch_config, tiles

from ..ptx import driver
from .triton_cases import looks

if TYPE_CHECKING:
    from ..ptx.driver import Card

# Of each kernel one that can go wrong in many ways.
FEW = (
    "nf4 as torch.bfloat16",
    "sdnq3 as torch.float16",  # once decoded by shifts of fewer than no bits
    "q4_k 33x512 times 1 rows of torch.float16",
    "nf4 times 17 rows of torch.bfloat16",
    "q6_k 6x512 apart again",
    "torch.bfloat16 as torch.float8_e4m3fn",
    "codes of rows as torch.bfloat16, each, tile 4",
    "by runs as torch.float16",
    "rotated by 16",
    "nvfp4 as torch.bfloat16",
    "iq2_xxs 6x512 as torch.bfloat16",
    "iq1_m 6x512 apart times 17 rows of torch.float16",
    "tq1_0 6x512 apart as torch.float16",
    "nvfp4 with a branch",
    "sides of a branch 0 as torch.bfloat16",
    "sides of a branch 1 as torch.float16",
    "scaled as torch.bfloat16",
    "gathered as torch.float16",
    "6 bits in groups of 16 expanded, torch.float8_e4m3fn",
    "rule ('int4', 'int8', 128, 256, 'absmax') as torch.float16",
    "('float8_e4m3fn', 300, 300, False) as torch.float16",
)
PARTS = 16
CHECKS = {"decode_kernel", "one_row_kernel", "rows_kernel", "again_kernel", "quantize_kernel", "finish_kernel",
          "product_kernel", "runs_kernel", "rotate_kernel", "branch_kernel", "down_kernel", "up_kernel",
          "expand_kernel", "tiles_kernel", "tiled_product_kernel", "numbers_kernel",
          "scaling_kernel", "gather_kernel"}  # fmt: skip


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, compiled_kernels: Path) -> Iterator[Card]:
    """A card on which everything runs, and which has the tiles of an A100; the verdicts on it are gone afterwards."""
    caches = (imports.eight, imports.products, imports.rotation, dispatch.readers)
    for module in (launch_config, launch):
        monkeypatch.setattr(module, "works_on", lambda device: True)
    for module, name in (
        (dispatch, "_READERS"),
        (dispatch, "_ways"),
        (dispatch, "_verdicts"),
        (int8_reference, "_quantize"),
    ):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    monkeypatch.setattr(int8_gemm, "device_tiles", lambda device: (tiles.tiles((8, 0)), 108))
    monkeypatch.setattr(bound_linear, "current_index", lambda x: x.get_device())
    for cache in caches:
        cache.cache_clear()
    with driver.use() as found:
        yield found
    for cache in caches:
        cache.cache_clear()


def test_some_cases_of_every_kernel(card: Card) -> None:
    some = {name: look for name, look in looks("cpu", thorough=True) if name in FEW}
    assert set(some) == set(FEW)
    assert [f"{name}: {why}" for name, look in some.items() if (why := look())] == []
    assert set(card.launched) == CHECKS


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_cases(part: int, card: Card) -> None:
    some = islice(looks("cpu", thorough=True), part, None, PARTS)
    assert [f"{name}: {why}" for name, look in some if (why := look())] == []
    assert card.launched

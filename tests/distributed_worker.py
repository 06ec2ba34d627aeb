"""What tests/test_distributed.py has several processes do: `torchrun ... tests/distributed_worker.py WHAT FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from sdquant import demo
from sdquant.errors import DistributedError
from sdquant.rules import QuantizationRule
from sdquant.rules.core.qtypes import QTYPES
from sdquant.rules.core.sharding import sharded
from sdquant.rules.packed_qarray import encode
from sdquant.utils.distributed import Processes, processes

SHAPES = ((10, 64), (7, 32, 3, 3), (1, 64))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Schemes with what is particular about them: statistics of statistics, a library of its own, sdquant's own config in a
# text encoder, types below a byte, tables.
QUANTS = ("nf4,double_quant", "qint8", "int8", "rules,weight_qtype=int4,tile_size=16", "fp8,embeddings")


def weight(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A weight with a row that has no number below zero."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64) - 0.3
    made[0] = made[0].abs()
    return made.to(dtype)


def rules() -> list[QuantizationRule]:
    """A rule for every type, in tiles and without, and every way to find a range that is found in parts."""
    made = []
    for row in QTYPES:
        for tile in (row.tile,) if row.tile else (None, 16):
            for method in ("absmax", "minmax,0.9") if row.asymmetric else ("absmax",):
                made.append(QuantizationRule(weight_qtype=row.name, tile_size=tile, weight_calibration_method=method))
    return made


def packed() -> list[dict[str, torch.Tensor]]:
    """Each weight as each rule says."""
    return [dict(encode(weight(shape, dtype), rule).parts) for rule in rules() for shape in SHAPES for dtype in DTYPES]


def ranges(ranks: Processes, folder: Path) -> None:
    """Write what each process makes of the same weights, their ranges found by all, in more and in fewer parts."""
    made = []
    for count in (2, ranks.count, ranks.count + 3):
        with sharded(count, ranks):
            made.append(packed())
    torch.save(made, folder / f"ranges-{ranks.rank}.pt")


def numbers(ranks: Processes, folder: Path) -> None:
    """Write the largest and the least of what the processes have; see `rows`."""
    made = {}
    for dtype in (*DTYPES, torch.float64):
        mine = rows(dtype, ranks.count)[ranks.rank]
        made[str(dtype)] = (ranks.largest(mine), ranks.least(mine))
    torch.save((made, ranks.gathered({"rank": ranks.rank})), folder / f"numbers-{ranks.rank}.pt")


def rows(dtype: torch.dtype, count: int) -> torch.Tensor:
    """[count, 40]: for each process its numbers, with infinities, NaN and zeros of both signs among them."""
    made = torch.randn(count, 40, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)
    for place, number in enumerate((float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -float("nan"))):
        made[place % count, place] = number
    made[:, 6] = torch.tensor([0.0, -0.0] * (count // 2))
    return made


def again(ranks: Processes, folder: Path) -> None:
    """Start and end a group once more, after the one that `main` has started."""
    with processes() as inner:
        assert inner.gathered(inner.rank) == list(range(ranks.count))


def quantize(ranks: Processes, folder: Path) -> None:
    """Write the shipped Flux pipeline in each scheme, in files of 200 KB."""
    from sdquant.loading import distributed_quantize
    from sdquant.planning.preparation import prepare

    for number, quant in enumerate(QUANTS):
        asked = _asked(quant)
        distributed_quantize.quantize(asked, prepare(asked), folder / str(number), ranks, max_shard=200_000)


def killed(ranks: Processes, folder: Path) -> None:
    """Begin the same by the command; the last process is killed while it writes."""
    from sdquant.cli import main
    from sdquant.loading import shard_writer

    left = [3]

    def write(self: shard_writer.ShardOutput) -> None:
        left[0] -= 1
        if ranks.rank == ranks.count - 1 and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        as_it_was(self)

    as_it_was, shard_writer.ShardOutput.write = shard_writer.ShardOutput.write, write  # type: ignore[method-assign]
    raise SystemExit(main(["quantize", str(demo.path("digits-flux")), str(folder / "model"), "-q", "int8"]))


def gone(ranks: Processes, folder: Path) -> None:
    """The last process is killed after it has written something; write what the first is told by gloo, not by torchrun,
    which would end it."""
    from sdquant.loading.distributed_quantize import _one_folder
    from sdquant.utils.atomic_write import part_file

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with _one_folder(folder / "model", 0, ranks) as beside:
            with part_file(beside / f"rank-{ranks.rank}", 3) as file:
                file.write(b"new")
            if ranks.rank == ranks.count - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except DistributedError as error:
        (folder / f"told-{ranks.rank}").write_text(str(error))
        raise


def _asked(quant: str) -> Any:
    from sdquant.planning.request import make_request

    return make_request(
        demo.path("digits-flux"), quant=quant, runtime="plain" if "," in quant else None, progress=False
    )


if __name__ == "__main__":
    with processes() as all_of_them:
        for what in sys.argv[1].split(","):
            globals()[what](all_of_them, Path(sys.argv[2]))

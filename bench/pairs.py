"""Time of layers with something more to compute against that of the same layer without it: rotations, branches.

    OMP_NUM_THREADS=1 python -m bench.pairs                     every pair, seven numbers of rows, bf16
    OMP_NUM_THREADS=1 python -m bench.pairs --dtype fp32 --rows 77 --only branch
    OMP_NUM_THREADS=1 python -m bench.pairs --gates             judge the results that are kept

3072 inputs and outputs, one thread, CPU time of that thread. All layers take turns, forwards in one round and backwards
in the next, so that each finds its weights out of the cache and a slow minute hits all alike; the time of each is the
lower quartile of its calls, since whatever else runs on a machine only adds to them. A branch is of rank 32, and the
layer without it has the very same codes. What is measured is kept in bench/results/pairs-INSTRUCTIONS.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench._results import read, write
from bench.linear_peers import Run, packed
from sdquant.core import FACTOR, Packed, PackedSpec, registry
from sdquant.kernels.cpu import isa
from sdquant.nn import quantized_layer

RESULTS = Path(__file__).parent / "results" / f"pairs-{isa() or 'torch'}.json"
SIZE, RANK = 3072, 32
ROWS = (1, 16, 77, 128, 256, 1024, 4096)
ROUNDS = {1: 81, 16: 61, 77: 41, 128: 31, 256: 31, 1024: 15, 4096: 7}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """`one` takes at most `limit` times as long as `other`, from `least` rows on."""

    one: str
    other: str
    limit: float
    least: int

    @property
    def name(self) -> str:
        return f"{self.one} against {self.other}"


def _branch(name: str) -> Pair:
    return Pair(one=f"{name} with its branch", other=name, limit=1.15, least=77)


_BRANCHES = ("sdnq-uint4,svd", "sdnq-uint4,svd,hadamard", "sdnq-int8,svd", "svdquant_w4a4", "svdquant_nvfp4")
PAIRS: tuple[Pair, ...] = (
    Pair(one="int8_convrot compute=int8", other="int8 compute=int8", limit=1.10, least=77),
    Pair(one="int8_convrot compute=int8", other=PLAIN, limit=0.65, least=256),
    *map(_branch, _BRANCHES),
    *map(_branch, (f"{name} compute=int8" for name in _BRANCHES)),
)


def _svdquant(scheme: str, dtype: torch.dtype) -> Packed:
    """A weight as its files have it, of random numbers: how long it takes does not depend on them.

    Its factors are of 16 bits, whatever activations are.
    """
    spec = PackedSpec(scheme=registry.scheme(scheme), shape=(SIZE, SIZE), dtype=str(dtype).removeprefix("torch."))
    floats = torch.bfloat16 if dtype is torch.float32 else dtype
    scale = torch.rand(SIZE, SIZE // (64 if scheme == "svdquant_w4a4" else 16)) * 0.005 + 0.002
    if scheme == "svdquant_nvfp4":
        scale, spec = (scale * 100).to(torch.float8_e4m3fn), replace(spec, details={FACTOR: 0.01})
    parts = {
        "codes": torch.randint(0, 256, (SIZE, SIZE // 2), dtype=torch.uint8),
        "scale": scale if scheme == "svdquant_nvfp4" else scale.to(floats),
        "smooth": (torch.rand(SIZE) + 0.5).to(floats),
        "down": (torch.randn(SIZE, RANK) * 0.02).to(floats),
        "up": (torch.randn(SIZE, RANK) * 0.02).to(floats),
    }
    return Packed(spec=spec, parts=parts)


def layer(name: str, floats: nn.Linear, made: dict[str, Packed]) -> Run:
    """Return the layer of a name in `PAIRS`. `made`: the weights of schemes, which layers share."""
    if name == PLAIN:
        return floats
    words = name.replace(" with its branch", "").split()
    scheme, compute = words[0], words[1].removeprefix("compute=") if words[1:] else None
    if scheme not in made:
        dtype: torch.dtype = floats.weight.dtype
        made[scheme] = _svdquant(scheme, dtype) if scheme.startswith("svdquant") else packed(floats, scheme)
    held = made[scheme]
    branch = held.spec.scheme.codec.low_rank(held)
    if branch is not None and "with its branch" not in name:
        held = replace(held, parts=branch.residual_of(held.parts))
    return quantized_layer(floats, held, compute=compute)


def times(runs: Mapping[str, Run], x: torch.Tensor, rounds: int) -> dict[str, float]:
    """Seconds of thread time of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for name in runs:
        runs[name](x)
    for number in range(rounds):
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            start = time.thread_time()
            runs[name](x)
            found[name].append(time.thread_time() - start)
    return {name: statistics.quantiles(values, n=4)[0] for name, values in found.items()}


def measured(pairs: Iterable[Pair], rows: Iterable[int], dtype: str) -> Iterable[dict[str, Any]]:
    """Yield a row of results for each pair and number of rows."""
    torch.manual_seed(0)
    floats = nn.Linear(SIZE, SIZE, bias=False, dtype=DTYPES[dtype])
    floats.weight.data.normal_(0, 0.02)
    floats.weight.requires_grad_(False)
    pairs, made = tuple(pairs), {}
    names = dict.fromkeys((PLAIN, *(name for pair in pairs for name in (pair.one, pair.other))))
    runs = {name: layer(name, floats, made) for name in names}
    for count in rows:
        found = times(runs, torch.randn(count, SIZE).to(DTYPES[dtype]), ROUNDS.get(count, 15))
        for pair in pairs:
            yield {
                "name": pair.name, "case": f"{SIZE}x{SIZE} {dtype} M={count}",
                "ratio": round(found[pair.one] / found[pair.other], 3), "rows": count, "dtype": dtype,
                "milliseconds": round(found[pair.one] * 1e3, 3), "plain_ms": round(found[PLAIN] * 1e3, 3),
            }  # fmt: skip


def missed(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each row above the limit of its pair."""
    limits = {pair.name: pair for pair in PAIRS}
    return [
        f"{row['name']}, {row['case']}: {row['ratio']:.2f} > {pair.limit}"
        for row in rows
        if (pair := limits.get(row["name"])) and row["rows"] >= pair.least and row["ratio"] > pair.limit
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="TEXT", help="pairs with this in their names (repeat)")
    parser.add_argument("--rows", action="append", type=int, help="these numbers of rows alone (repeat)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of activations and plain weights")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file to keep; rows measured before stay in it")
    parser.add_argument("--gates", action="store_true", help="measure nothing, judge what the file holds")
    args = parser.parse_args()
    kept = {(row["name"], row["case"]): row for row in read(args.json)} if args.json.exists() else {}
    if not args.gates:
        torch.set_num_threads(1)
        pairs = [pair for pair in PAIRS if not args.only or any(text in pair.name for text in args.only)]
        with torch.inference_mode():
            for row in measured(pairs, args.rows or ROWS, args.dtype):
                print(f"{row['case']:22}{row['ratio']:.2f}  {row['name']}", flush=True)
                kept[row["name"], row["case"]] = row
        write(args.json, "pairs", list(kept.values()))
    found = missed(kept.values())
    print("\n".join(found) or "every limit holds")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

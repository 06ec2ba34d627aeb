"""Time of one quantized 3 x 3 convolution against the bf16 one, by how many outputs there are in each channel.

    OMP_NUM_THREADS=1 python -m bench.convolutions              every format that loading quantizes to, and some files'
    OMP_NUM_THREADS=1 python -m bench.convolutions --only nf4 --side 16

As `bench.linear`: one thread, its CPU time, medians, forwards and backwards by turns. `rows` is the number of outputs:
of an input of 16 x 16, 256. The stored weight is what `quantized_layer` makes of it, in sdquant's own layers alone.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench._results import read, write
from bench.linear import INTEGER, INTEGERS, OURS, PLAIN, measured
from bench.linear_peers import packed
from sdquant import backends
from sdquant.core.backend import Unfit
from sdquant.kernels.cpu import isa
from sdquant.nn import quantized_layer

RESULTS = Path(__file__).parent / "results" / f"convolution-{isa() or 'torch'}.json"
SIDES = (4, 8, 16, 32, 64)
# In and out: those of the UNets, where most of their weights are; and so few that what a call costs is all there is.
CHANNELS = (640, 1280, 32)
ROUNDS = {4: 15, 8: 15, 16: 11, 32: 7, 64: 3}
FILES = ("q8_0", "q6_k", "q5_k", "q4_k", "q4_0")


def schemes() -> tuple[str, ...]:
    """Those that loading quantizes to, and some that are only in files."""
    return (*(row.name for row in backends.schemes() if row.on_the_fly and row.name != "rules"), *FILES)


def rows_of(
    scheme: str, channels: int, sides: tuple[int, ...], integers: bool, dtype: torch.dtype, seconds: float
) -> list[dict[str, Any]]:
    """The rows of one format and number of channels."""
    torch.manual_seed(0)
    floats: Any = nn.Conv2d(channels, channels, 3, padding=1, bias=False, dtype=dtype)
    floats.weight.data.normal_(0, 0.02)
    floats.weight.requires_grad_(False)
    held = packed(floats, scheme)
    runs: dict[str, Any] = {PLAIN: floats, OURS: quantized_layer(floats, held)}
    if integers and scheme in INTEGERS:
        runs[INTEGER] = quantized_layer(floats, held, compute="int8")
    made = []
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    shape = f"{channels}x{channels}x3x3"
    for side in sides:
        x = torch.randn(1, channels, side, side).to(dtype)
        found = measured(runs, x, ROUNDS.get(side, 5), seconds)
        base = found[PLAIN]["seconds"]
        made += [
            {"name": f"{scheme} · {who}", "case": f"{shape} {name} M={side * side}",
             "ratio": values["seconds"] / base if "seconds" in values else None, "format": scheme, "who": who,
             "shape": shape, "dtype": name, "rows": side * side, "plain_ms": base * 1e3, **values}
            for who, values in found.items()
        ]  # fmt: skip
    return made


def main() -> None:
    """Measure, and write after each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="SCHEME", help="these formats alone (repeat)")
    parser.add_argument("--side", action="append", type=int, help="these sizes of the input alone (repeat)")
    parser.add_argument("--channels", action="append", type=int, help="these numbers of channels alone (repeat)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of activations and plain weights")
    parser.add_argument("--integers", action="store_true", help='compute="int8" as well')
    parser.add_argument("--seconds", type=float, default=10.0, help="of one format and size, at most")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file to keep; rows measured before stay in it")
    args = parser.parse_args()
    kept = {(row["name"], row["case"]): row for row in read(args.json)} if args.json.exists() else {}
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    torch.set_num_threads(1)
    with torch.inference_mode():
        for scheme in args.only or schemes():
            for channels in args.channels or CHANNELS:
                try:
                    rows = rows_of(scheme, channels, tuple(args.side or SIDES), args.integers, dtype, args.seconds)
                except Unfit as error:
                    print(scheme, channels, error, sep="  ", flush=True)
                    continue
                kept.update({(row["name"], row["case"]): row for row in rows})
                said = [f"{row['who']} M={row['rows']} {row['ratio'] or 0:.2f}" for row in rows if row["who"] != PLAIN]
                print(scheme, channels, *said, sep="  ", flush=True)
                gc.collect()
            write(args.json, "convolutions", list(kept.values()))


if __name__ == "__main__":
    main()

"""Whether `compute="int8"` is ever behind the fastest peer's products in 8 bits (W8A8), and nothing else: ten minutes.

    OMP_NUM_THREADS=1 python -m bench.int8_peers                              five numbers of rows, two shapes
    OMP_NUM_THREADS=1 python -m bench.int8_peers --rows 4608 --shape 3072x3072 --only int8_sym

For a quiet machine. CPU time of the process, medians, by turns, as in `bench.linear --integers`, which has the float
layer, weight-only peers and all formats beside, and takes an hour. What has no peer in 8 bits is compared with
`int8_sym`'s. Exits with 1 where a peer is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

import torch
from torch import nn

from bench.linear import INTEGER, ROUNDS, SHAPES, measured
from bench.linear_peers import Run, packed, sdnq_matmul, torchao_layer
from sdquant.nn import quantized_layer

ROWS = (1, 8, 77, 256, 1024)
SCHEMES = ("int8_sym",)
AT_MOST = 1.0  # of the fastest peer's time


def runs_of(floats: nn.Linear, scheme: str) -> dict[str, Run]:
    """What takes turns, by name: ours, and each peer that is installed."""
    made: dict[str, Run] = {INTEGER: quantized_layer(floats, packed(floats, scheme), compute="int8")}
    if importlib.util.find_spec("sdnq"):
        made["sdnq int8 matmul"] = sdnq_matmul(floats, "sdnq-int8")
    dynamic = torchao_layer(floats, True)
    if dynamic is not None:
        made["torchao int8 dynamic"] = dynamic
    return made


def compared(scheme: str, shape: str, counts: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    """A row for each number of rows: seconds of each, and ours as a part of the fastest peer's; None without any."""
    inputs, outputs = (int(number) for number in shape.split("x"))
    torch.manual_seed(0)
    floats = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    floats.weight.data.normal_(0, 0.02)
    runs, made = runs_of(floats, scheme), []
    for count in counts:
        x = torch.randn(count, inputs).bfloat16()
        found = {
            name: row["seconds"]
            for name, row in measured(runs, x, ROUNDS.get(count, 9), seconds).items()
            if "seconds" in row
        }
        peers = [value for name, value in found.items() if name != INTEGER]
        ratio = found[INTEGER] / min(peers) if peers else None
        made.append({"case": f"{scheme} {shape} M={count}", "seconds": found, "ratio": ratio})
    return made


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="SCHEME", help="these formats alone (repeat)")
    parser.add_argument("--rows", action="append", type=int, help="these numbers of rows alone (repeat)")
    parser.add_argument("--shape", action="append", help="these shapes alone, IN x OUT (repeat)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one format, shape and number of rows, at most")
    args = parser.parse_args(given)
    torch.set_num_threads(1)
    behind = 0
    with torch.inference_mode():
        for scheme in args.only or SCHEMES:
            for shape in args.shape or SHAPES:
                for row in compared(scheme, shape, tuple(args.rows or ROWS), args.seconds):
                    times = "  ".join(f"{name} {value * 1e3:.2f} ms" for name, value in row["seconds"].items())
                    ratio = row["ratio"]
                    behind += ratio is not None and ratio > AT_MOST
                    print(f"{row['case']:32}{'-' if ratio is None else f'{ratio:.2f}':>6}  {times}", flush=True)
    print(f"behind the fastest peer in {behind} cases")
    return behind > 0


if __name__ == "__main__":
    sys.exit(main())

"""Time of a linear layer over a GGUF weight: sdquant's, diffusers' and plain bf16, one thread, interleaved medians.

    OMP_NUM_THREADS=1 python -m bench.gguf_linear [--json FILE] [--rounds N] [--size N]

Times are CPU time of the calling thread, so that other work on the machine counts less. The layers take turns, so that
a slow minute hits them all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import torch
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from torch import nn

from sdquant import backends
from sdquant.layers import quantized_layer

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = ("q8_0", "q4_0", "q4_k")
ROWS = (1, 77, 1024)


def layers(kind: str, size: int) -> dict[str, nn.Module]:
    """The same weight three times: [size, size], bf16 activations, no bias."""
    torch.manual_seed(0)
    plain = nn.Linear(size, size, bias=False, dtype=torch.bfloat16)
    backend = backends.of_scheme(kind)
    packed = backend.encode(plain.weight.data, backends.parse(kind))
    ours = quantized_layer(plain, packed)
    theirs = GGUFLinear(size, size, bias=False, compute_dtype=torch.bfloat16)
    theirs.weight = GGUFParameter(
        packed.parts["blocks"].view(size, -1), quant_type=gguf.GGMLQuantizationType[kind.upper()]
    )
    return {"sdquant": ours, "diffusers": theirs, "bf16": plain}


def medians(turns: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, after one turn that warms up."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            start = time.thread_time()
            turn()
            if number:
                times[name].append((time.thread_time() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each layer")
    parser.add_argument("--size", type=int, default=3072, help="inputs and outputs of the layer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    print(
        f"linear {args.size} x {args.size}, bf16, 1 thread, ms of CPU time (median of {args.rounds}); x = against bf16"
    )
    print(f"{'type':6}{'rows':>6}{'sdquant':>18}{'diffusers':>18}{'bf16':>10}")
    for kind in KINDS:
        made = layers(kind, args.size)
        for rows in ROWS:
            x = torch.randn(rows, args.size, dtype=torch.bfloat16)
            with torch.no_grad():
                got = medians({name: partial(layer, x) for name, layer in made.items()}, args.rounds)
            cells = "".join(f"{got[name]:9.2f} ({got[name] / got['bf16']:5.2f}x)" for name in ("sdquant", "diffusers"))
            print(f"{kind:6}{rows:6}{cells}{got['bf16']:10.2f}", flush=True)
            case = f"linear {args.size}x{args.size}, {rows} rows, 1 thread"
            results += [
                {"name": f"{name} {kind}", "case": case, "ratio": got[name] / got["bf16"], "ms": got[name]}
                for name in ("sdquant", "diffusers")
            ]
    if args.json:
        from bench import _results

        _results.write(args.json, "gguf_linear", results, rounds=args.rounds)


if __name__ == "__main__":
    main()

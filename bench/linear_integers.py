"""Products in 8-bit integers of both sides against SDNQ's and torchao's, by the CPU time of the whole process.

    OMP_NUM_THREADS=1 python -m bench.linear_integers                     six numbers of rows, two shapes
    OMP_NUM_THREADS=1 python -m bench.linear_integers --rows 4608 --json FILE

SDNQ multiplies in threads of its own, of which `bench.linear`, which asks for the calling thread's time, sees nothing.
int8_sym, bf16 activations; each is timed by turns with the plain bf16 layer, whose time the ratios are to. What is
measured is kept in bench/results/integers-INSTRUCTIONS.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench._results import write
from bench.linear import INTEGER, PLAIN, ROWS, SHAPES
from bench.linear_peers import Run, packed, sdnq_matmul, torchao_layer
from sdquant.kernels.cpu import isa
from sdquant.nn import quantized_layer

RESULTS = Path(__file__).parent / "results" / f"integers-{isa() or 'torch'}.json"
ROUNDS = {1: 61, 8: 31, 77: 21, 256: 15, 1024: 9, 4608: 5}


def layers(floats: nn.Linear) -> dict[str, Run]:
    """What takes turns, by name; without what is not installed."""
    made: dict[str, Run | None] = {
        PLAIN: floats,
        INTEGER: quantized_layer(floats, packed(floats, "int8_sym"), compute="int8"),
        "sdnq int8 matmul": sdnq_matmul(floats, "sdnq-int8"),
        "torchao int8 dynamic": torchao_layer(floats, dynamic=True),
    }
    return {name: run for name, run in made.items() if run is not None}


def seconds(runs: dict[str, Run], x: torch.Tensor, rounds: int) -> dict[str, float]:
    """Median seconds of the process for a call of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(x), run(x)
    for number in range(rounds):
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            start = time.process_time()
            runs[name](x)
            times[name].append(time.process_time() - start)
    return {name: statistics.median(some) for name, some in times.items()}


def rows_of(shape: str, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """The rows of one shape, printed as they come."""
    inputs, outputs = (int(n) for n in shape.split("x"))
    torch.manual_seed(0)
    floats = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    floats.weight.data.normal_(0, 0.02)
    runs, made = layers(floats), []
    for count in counts:
        found = seconds(runs, torch.randn(count, inputs).bfloat16(), ROUNDS.get(count, 9))
        ratios = {name: value / found[PLAIN] for name, value in found.items()}
        print(f"{shape} M={count}", *(f"{name} {ratio:.2f}" for name, ratio in ratios.items()), sep="  ", flush=True)
        made += [
            {"name": name, "case": f"{shape} bf16 M={count}", "ratio": ratio, "seconds": found[name]}
            for name, ratio in ratios.items()
        ]
    return made


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="append", type=int, help="these numbers of rows alone (repeat)")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        made = [row for shape in SHAPES for row in rows_of(shape, tuple(args.rows or ROWS))]
    write(args.json, "linear_integers", made)


if __name__ == "__main__":
    main()

"""Time of one quantized linear layer against plain bf16 and against whatever else runs its format.

    OMP_NUM_THREADS=1 python -m bench.linear                       every format, six numbers of rows, two shapes
    OMP_NUM_THREADS=1 python -m bench.linear --only nf4 --only q8_0 --rows 1 --rows 1024 --shape 3072x3072
    OMP_NUM_THREADS=1 python -m bench.linear --rules               types by rules, which have a file of their own
    OMP_NUM_THREADS=1 python -m bench.linear --gates               judge the results that are kept

One thread of torch's, CPU time of the process (SDNQ has threads of its own), medians. The layers of one format take
turns, forwards in one round and backwards in the next, so that each finds its weights out of the cache and a slow
minute hits all alike. Every number is a ratio to the plain layer of the same dtype in the same turns. `first` is the
first call, in seconds; what sdquant finds out by its first calls is found before the others are timed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench._results import read, write
from bench.linear_gates import judge, lines
from bench.linear_peers import FAMILIES, RULES, Family, Run, packed, sdnq_matmul, torchao_layer
from sdquant.kernels import fastest
from sdquant.kernels.cpu import isa
from sdquant.nn import quantized_layer

RESULTS = Path(__file__).parent / "results" / f"linear-{isa() or 'torch'}.json"  # machines differ too much to share one
ROWS = (1, 8, 77, 256, 1024, 4608)
SHAPES = ("3072x3072", "3072x12288")  # in x out
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PLAIN, OURS, INTEGER = "plain", "sdquant", "sdquant compute=int8"
ROUNDS = {1: 31, 8: 25, 77: 15, 256: 13, 1024: 9, 4608: 5}
# Formats whose products with int8 activations are timed too; their peers.
INTEGERS = (
    "qint8",
    "int8_sym",
    "int8",
    "bnb-int8",
    "int4",
    "qint4",
    "nf4",
    "q8_0",
    "svdq-int4",
    "svdq-nvfp4",
    "q4_0",
    "q4_k",
    "int8_convrot",
    "int8_row",
    "mxfp8",
    "comfy:nvfp4",
    "w4a8",
    "sdnq-int8",
    "sdnq-uint4",
)


def variants(family: Family, floats: nn.Linear, integers: bool, alone: bool = False) -> dict[str, Run]:
    """What takes turns, by name."""
    held = packed(floats, family.scheme)
    made: dict[str, Run] = {PLAIN: floats, OURS: quantized_layer(floats, held)}
    if integers and family.scheme in INTEGERS:
        made[INTEGER] = quantized_layer(floats, held, compute="int8")
    if alone:
        return made
    for name, make in family.peers.items():
        run = make(floats, family.scheme)
        if run is not None:
            made[name] = run
    if integers and family.scheme in ("int8_sym", "sdnq-int8") and importlib.util.find_spec("sdnq"):
        made["sdnq int8 matmul"] = sdnq_matmul(floats, "sdnq-int8")
    if family.scheme == "int8_sym":
        for name, dynamic in (("torchao int8 weight-only", False), ("torchao int8 dynamic", True)):
            run = torchao_layer(floats, dynamic)
            if run is not None:
                made[name] = run
    return made


def settle(run: Run, x: torch.Tensor) -> None:
    """Call until it is decided which implementation multiplies such x."""
    for _ in range(4 * fastest.CALLS):
        with fastest.lookups() as keys:
            run(x)
        if keys <= fastest.verdicts_so_far().keys():
            return


def measured(runs: dict[str, Run], x: torch.Tensor, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Median CPU seconds of the process for each; what raises says so instead. Stops early after `seconds`."""
    found: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {}
    for name, run in runs.items():
        start = time.process_time()
        try:
            run(x)
        except Exception as error:  # a peer that cannot do this shape or dtype is a row that says so
            found[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
            continue
        found[name], times[name] = {"first": time.process_time() - start}, []
        settle(run, x)
    begin = time.monotonic()
    for number in range(rounds):
        for name in list(times) if number % 2 else list(times)[::-1]:
            start = time.process_time()
            runs[name](x)
            times[name].append(time.process_time() - start)
        if time.monotonic() - begin > seconds and number >= 2:
            break
    for name, values in times.items():
        found[name] |= {"seconds": statistics.median(values), "rounds": len(values)}
    return found


def rows_of(
    family: Family, shape: str, dtype: str, counts: tuple[int, ...], integers: bool, seconds: float, alone: bool = False
) -> list[dict[str, Any]]:
    """The rows of one format, shape and dtype; `alone`: of no peer."""
    inputs, outputs = (int(n) for n in shape.split("x"))
    torch.manual_seed(0)
    floats = nn.Linear(inputs, outputs, bias=False, dtype=DTYPES[dtype])
    floats.weight.data.normal_(0, 0.02)
    floats.weight.requires_grad_(False)
    runs = variants(family, floats, integers, alone)
    made = []
    for count in counts:
        x = torch.randn(count, inputs).to(DTYPES[dtype])
        found = measured(runs, x, ROUNDS.get(count, 9), seconds)
        base = found[PLAIN]["seconds"]
        for name, values in found.items():
            ratio = values["seconds"] / base if "seconds" in values else None
            made.append(
                {"name": f"{family.scheme} · {name}", "case": f"{shape} {dtype} M={count}", "ratio": ratio,
                 "format": family.scheme, "who": name, "shape": shape, "dtype": dtype, "rows": count,
                 "plain_ms": base * 1e3, **values}
            )  # fmt: skip
    return made


def overhead(family: Family, seconds: float) -> list[dict[str, Any]]:
    """Microseconds of a call that has next to nothing to compute: 128 inputs, 128 outputs, one row."""
    rows = rows_of(family, "128x128", "bf16", (1,), False, seconds)
    return [row | {"microseconds": row["seconds"] * 1e6} for row in rows if "seconds" in row]


def show(rows: list[dict[str, Any]]) -> None:
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    for case, some in by_case.items():
        cells = "  ".join(f"{row['who']} {row['ratio']:.2f}" if row["ratio"] else f"{row['who']} -" for row in some)
        print(f"  {case:26}{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="SCHEME", help="these formats alone (repeat)")
    parser.add_argument("--rows", action="append", type=int, help="these numbers of rows alone (repeat)")
    parser.add_argument("--shape", action="append", help="these shapes alone, IN x OUT (repeat)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of activations and plain weights")
    parser.add_argument("--rules", action="store_true", help="types by rules, not the other formats")
    parser.add_argument("--integers", action="store_true", help='compute="int8" as well')
    parser.add_argument("--alone", action="store_true", help="without what else runs the format")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one format, shape and number of rows, at most")
    parser.add_argument("--json", type=Path, help="the file to keep; rows measured before stay in it")
    parser.add_argument("--gates", action="store_true", help="measure nothing, judge what the file holds")
    args = parser.parse_args()
    args.json = args.json or (RESULTS.with_name(RESULTS.name.replace("linear", "rules")) if args.rules else RESULTS)
    kept = {(row["name"], row["case"]): row for row in read(args.json)} if args.json.exists() else {}
    if not args.gates:
        torch.set_num_threads(1)
        with torch.inference_mode():
            for family in RULES if args.rules else FAMILIES:
                if args.only and family.scheme not in args.only:
                    continue
                print(family.scheme, flush=True)
                for shape in args.shape or SHAPES:
                    rows = rows_of(
                        family, shape, args.dtype, tuple(args.rows or ROWS), args.integers, args.seconds, args.alone
                    )
                    show(rows)
                    kept.update({(row["name"], row["case"]): row for row in rows})
                    gc.collect()
                if args.dtype == "bf16" and not args.shape and not args.alone:
                    rows = overhead(family, args.seconds)
                    show(rows)
                    kept.update({(row["name"], row["case"]): row for row in rows})
                write(args.json, "linear", list(kept.values()))
    for line in lines(judge(list(kept.values()))):
        print(line)


if __name__ == "__main__":
    main()

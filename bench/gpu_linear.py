"""Time of one quantized linear layer on a card, against plain bf16 and against what else runs its format (G20, G21).

    python -m bench.gpu_linear                                 every format, ten numbers of rows, two shapes of Flux
    python -m bench.gpu_linear --only nf4 --only q4_k --rows 1 --rows 4608
    python -m bench.gpu_linear --device cpu --size 128         the same steps without a card; its numbers mean nothing

CUDA events, medians, the ways of one format in turns, the card's cache written over before each call. Every number is a
ratio to the plain bf16 layer of the same turns. `error` is the distance from the product with the decoded weight in
float32, as a part of it. "decoded by Triton" and "multiplied by Triton" are what sdquant chooses between: where they
cross is what `few` of the Triton reader should be. "fields apart" is the same with GGUF's blocks in the order that
models loaded for a card have (`sdquant/core/gguf_fields.py`); without it, blocks as in the file.
Without a CUDA device it says so, and exits with 2.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench._cards import FUSED, OURS, PLAIN, Clock, Run, peers, present, ways
from bench._results import read, write
from sdquant import backends

RESULTS = Path(__file__).parent / "results" / "gpu-linear.json"
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4608)
SCHEMES = (
    "nf4", "nf4,double_quant", "fp8", "fp8,packing=float8", "bnb-int8", "qint8", "qint4", "qfloat8", "int8", "int8_sym",
    "int4", "int4_sym", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0", "q3_k", "q2_k", "iq4_xs", "sdnq-int8", "sdnq-uint4",
)  # fmt: skip
HIDDEN = 3072
FUSED_UP_TO = 512  # rows for which the fused product is measured
ROUNDS = 25
# Most that a layer may take at 4608 rows, as a part of the plain one: G20, and G21 for products in 8 bits.
GATES = {"nf4": 1.06, "q": 1.25, "other": 1.10, "eight": 1 / 1.6}
EIGHT = ("int8 by Triton", "float8 by Triton", f"{OURS} compute=int8")
# Formats whose codes are multiplied as they are; for the others G21 is asked of nobody.
DIRECT = ("int8_sym", "bnb-int8", "qint8", "fp8,packing=float8")
TALL = 4608


def measured(
    scheme: str,
    inputs: int,
    outputs: int,
    counts: tuple[int, ...],
    clock: Clock,
    rounds: int,
    without: tuple[str, ...] = (),
) -> list[Any]:
    """The rows of one format and shape, without the ways of these names."""
    torch.manual_seed(0)
    floats = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16, device=clock.device)
    floats.weight.data.normal_(0, 0.02)
    floats.weight.requires_grad_(False)
    runs: dict[str, Run] = {name: run for name, run in ways(floats, scheme).items() if name not in without}
    errors: dict[str, str] = {}
    for name, make in peers(scheme).items():
        if name in without:
            continue
        try:
            run = make(floats)
        except Exception as error:  # a peer that cannot do this here is a row that says so
            errors[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        if run is not None:
            runs[name] = run.to(clock.device) if isinstance(run, nn.Module) else run
    spec = backends.parse(scheme)
    backend = backends.get(spec.scheme.backend)
    weight = backend.decode(backend.encode(floats.weight.data, spec), torch.bfloat16).float()
    made = []
    for count in counts:
        x = torch.randn(count, inputs, device=clock.device).to(torch.bfloat16)
        exact = x.float() @ weight.T
        found: dict[str, dict[str, Any]] = {name: {"error": text} for name, text in errors.items()}
        calls: dict[str, Callable[[], Tensor]] = {}
        for name, run in runs.items():
            if name.startswith(FUSED) and count > FUSED_UP_TO:
                continue
            try:
                away = ((run(x).float() - exact).norm() / exact.norm()).item()
            except Exception as error:  # as above: `_int_mm` wants more than 16 rows, `_scaled_mm` a newer card
                found[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
                continue
            found[name] = {"distance": away}
            calls[name] = lambda run=run, x=x: run(x)  # type: ignore[misc]
        for name, seconds in clock.medians(calls, rounds).items():
            found[name] |= {"seconds": seconds, "call_us": clock.call(calls[name]) * 1e6}
        base = found[PLAIN]["seconds"]
        for name, values in found.items():
            ratio = values["seconds"] / base if "seconds" in values else None
            made.append(
                {"name": f"{scheme} · {name}", "case": f"{inputs}x{outputs} bf16 M={count}", "ratio": ratio,
                 "format": scheme, "who": name, "shape": f"{inputs}x{outputs}", "rows": count,
                 "plain_us": base * 1e6, **values}
            )  # fmt: skip
    return made


def show(rows: list[dict[str, Any]]) -> None:
    """A line for each case."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    for case, some in by_case.items():
        cells = (f"{row['who']} {row['ratio']:.2f}" if row["ratio"] else f"{row['who']} -" for row in some)
        print(f"  {case:28}{some[0]['plain_us']:9.1f} us  {'  '.join(cells)}", flush=True)


def judged(rows: list[dict[str, Any]], tall: int) -> list[str]:
    """The goals, and whether the rows meet them."""
    lines = []
    for row in rows:
        if row["rows"] != tall or row["ratio"] is None:
            continue
        kind = row["format"].split(",")[0]
        limit = None
        if row["who"] == OURS:
            limit, goal = (
                GATES.get(kind, GATES["q" if backends.parse(kind).scheme.backend == "gguf" else "other"]),
                "G20",
            )
        elif row["who"] in EIGHT and row["format"] in DIRECT:
            limit, goal = GATES["eight"], "G21"
        if limit is not None:
            verdict = "met" if row["ratio"] <= limit else "MISSED"
            lines.append(f"{goal} {verdict}: {row['name']} {row['shape']} {row['ratio']:.3f}, at most {limit:.3f}")
    ours = (OURS, PLAIN, *EIGHT)
    for row in (one for one in rows if one["who"] == OURS and one["ratio"]):
        same = [other for other in rows if (other["case"], other["format"]) == (row["case"], row["format"])]
        rivals = [other["ratio"] for other in same if other["ratio"] and other["who"] not in ours]
        if rivals and row["ratio"] > 1.3 * min(rivals):
            lines.append(f"G8 MISSED: {row['name']} {row['case']} {row['ratio']:.2f}, the best {min(rivals):.2f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=int, default=HIDDEN, help=f"the width of the model (default {HIDDEN}, Flux)")
    parser.add_argument("--only", action="append", metavar="SCHEME", help="these formats alone (repeat)")
    parser.add_argument("--rows", action="append", type=int, help="these numbers of rows alone (repeat)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help=f"the file to keep (default on a card: {RESULTS.name})")
    args = parser.parse_args()
    if not present(args.device):
        return 2
    clock, kept = Clock(torch.device(args.device)), {}
    path = args.json or (RESULTS if clock.card else None)
    if path is not None and path.exists():
        kept = {(row["name"], row["case"]): row for row in read(path)}
    counts = tuple(args.rows or (ROWS if clock.card else (1, 16, 40)))
    seen: list[dict[str, Any]] = []
    with torch.inference_mode():
        for scheme in args.only or SCHEMES:
            print(scheme, flush=True)
            for outputs in (args.size, 4 * args.size):
                rows = measured(scheme, args.size, outputs, counts, clock, args.rounds)
                show(rows)
                seen += rows
                gc.collect()
            if path is not None:
                kept.update({(row["name"], row["case"]): row for row in seen})
                write(path, "gpu-linear", list(kept.values()))
    for line in judged(seen, TALL) if clock.card else ():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())

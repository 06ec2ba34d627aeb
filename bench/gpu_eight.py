"""Products of 8-bit codes on a card: torch's own and ours in several tiles, against bf16 of the same sizes.

    python -m bench.gpu_eight --json bench/results/gpu-eight.json   on a card, less than a minute
    python -m bench.gpu_eight --device cpu --small                  the same steps without one; its numbers mean nothing

The codes are there already: what is timed is the product and its scaling. `_int_mm` is followed by the launch that
scales its sums. "int8" is a weight with one scale for a row, "uint8" one with zero points, whose codes are changed in
the product ("uint8 + int8": before it, in a pass of its own), "runs" one with a scale for 256 columns. `row` is the
quantization of the activations, to int8. CUDA events, medians of calls in turns, the card's cache written over before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench._cards import Clock, present
from bench._results import write

SHAPES = ((3072, 3072), (3072, 12288), (12288, 3072))
ROWS = (256, 1024, 4608)
# Rows, columns and depth of a tile, warps, stages.
TILES = (
    (128, 256, 128, 8, 3), (128, 256, 128, 8, 4), (128, 128, 128, 8, 3), (128, 128, 128, 4, 3), (256, 128, 128, 8, 3),
    (64, 256, 128, 4, 3), (64, 128, 128, 4, 3), (64, 64, 128, 4, 4),
)  # fmt: skip
RUNS = ((64, 128, 128, 4, 3), (64, 128, 128, 8, 3), (128, 128, 128, 8, 3))
UNSIGNED = ((128, 256, 128, 8, 3), (128, 128, 128, 8, 3), (128, 128, 128, 4, 3))
MOST_PROCESSES = 15
ROUNDS = 9

Run = Callable[[], Any]


def ours(device: torch.device, m: int, inputs: int, outputs: int, only: int | None = None) -> dict[str, Run]:
    """The launches of our kernels, by name; one of them alone."""
    from sdquant.kernels.row_codes import RowCodes
    from sdquant.kernels.triton import int8_gemm
    from sdquant.kernels.triton.tiles import Tile

    x, codes = (torch.randint(-127, 128, (n, inputs), device=device, dtype=torch.int8) for n in (m, outputs))
    row_scale, sums = torch.rand(m, 1, device=device), torch.ones(m, 1, device=device, dtype=torch.int32)
    scale, bias = (torch.rand(outputs, device=device).bfloat16() for _ in range(2))
    zero = torch.randint(0, 255, (outputs,), device=device, dtype=torch.uint8)
    out = torch.empty(m, outputs, device=device, dtype=torch.bfloat16)
    signed, shifted = RowCodes(codes, scale), RowCodes(codes.view(torch.uint8), scale, 1.0, zero)
    scaled = int8_gemm.finishing(
        torch.zeros(m, outputs, device=device, dtype=torch.int32), row_scale, signed, bias, out, None
    )
    floats = torch.randn(m, inputs, device=device).bfloat16()
    quantized = int8_gemm.quantization(floats, x, row_scale, sums)

    def by_torch() -> None:
        total = torch._int_mm(x, codes.t())
        int8_gemm.finishing(total, row_scale, signed, bias, out, None)(device)

    launches = {f"int8 {name(tile)}": (signed, None, Tile(*tile)) for tile in TILES}
    launches["int8 as chosen"] = (signed, None, None)
    launches |= {f"uint8 {name(tile)}": (shifted, sums, Tile(*tile)) for tile in UNSIGNED}
    made = {
        key: int8_gemm.product(x, row_scale, weight, bias, out, of_rows, tile)
        for key, (weight, of_rows, tile) in launches.items()
    }

    run_scale = torch.rand(outputs, max(inputs // 256, 1), 1, device=device)
    for tile in RUNS:
        key = f"runs of 256 {name(tile)}"
        made[key] = int8_gemm.product_by_run(x, codes, run_scale, row_scale, bias, out, Tile(*tile))

    def both() -> None:
        RowCodes(shifted.signed(), scale, 1.0, zero)
        made["int8 as chosen"](device)

    runs: dict[str, Run] = {key: lambda launch=launch: launch(device) for key, launch in made.items()}
    runs |= {"row": lambda: quantized(device), "scaling": lambda: scaled(device), "_int_mm + scaling": by_torch}
    runs |= {"_int_mm": lambda: torch._int_mm(x, codes.t()), "uint8 + int8": both}
    return runs if only is None else dict(list(runs.items())[only : only + 1])


def theirs(device: torch.device, m: int, inputs: int, outputs: int) -> dict[str, Run]:
    """torch's products of bf16 and of float8."""
    x, weight = (torch.randn(n, inputs, device=device).bfloat16() for n in (m, outputs))
    bias = torch.rand(outputs, device=device).bfloat16()
    a, b = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    left, right = torch.rand(m, 1, device=device), torch.rand(1, outputs, device=device)

    def product(fast: bool, added: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        done: Tensor = torch._scaled_mm(a, b.T, left, right, bias=added, out_dtype=dtype, use_fast_accum=fast)
        return done

    return {
        "bf16": lambda: F.linear(x, weight, bias),
        "fp8 slow": lambda: product(False, None),
        "fp8 slow, then the bias": lambda: product(False, None).add_(bias),
        "fp8 slow with the bias": lambda: product(False, bias),
        "fp8 fast": lambda: product(True, None),
        "fp8 fast, then the bias": lambda: product(True, None).add_(bias),
        "fp8 fast with the bias": lambda: product(True, bias),
        "fp8 fast with the bias, fp16": lambda: product(True, bias.half(), torch.float16),
    }


def name(tile: tuple[int, ...]) -> str:
    return "x".join(map(str, tile[:3])) + f" {tile[3]}w {tile[4]}s"


def compile_one(index: int) -> str:
    """Launch one of our kernels at every size, so that Triton's cache has it; what is wrong, "" for nothing."""
    try:
        for inputs, outputs in SHAPES:
            for m in ROWS:
                for run in ours(torch.device("cuda"), m, inputs, outputs, index).values():
                    run()
        torch.cuda.synchronize()
    except Exception as error:  # the measurement says so in a row
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def compile_all() -> None:
    count = len(TILES) + len(UNSIGNED) + len(RUNS) + 4
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1, count), mp_context=context) as pool:
        list(pool.map(compile_one, range(count)))


def measured(clock: Clock, m: int, inputs: int, outputs: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each product of one size; `ratio` is to bf16, `rate` in TOP/s."""
    runs: dict[str, Run] = {}
    errors: dict[str, str] = {}
    for key, run in (theirs(clock.device, m, inputs, outputs) | ours(clock.device, m, inputs, outputs)).items():
        try:
            run()
            runs[key] = run
        except Exception as error:  # what this card or this torch does not have is a row that says so
            errors[key] = f"{type(error).__name__}: {error}"[:200]
    seconds = clock.medians(runs, rounds)
    case = f"{inputs}x{outputs} M={m}"
    rows = [
        {"name": key, "case": case, "seconds": value, "ratio": value / seconds["bf16"],
         "rate": 2e-12 * m * inputs * outputs / value, "call_us": clock.call(runs[key]) * 1e6}
        for key, value in seconds.items()
    ]  # fmt: skip
    return [*rows, *({"name": key, "case": case, "error": text} for key, text in errors.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="one small size, to see that the steps run at all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="the file to write")
    args = parser.parse_args()
    if not present(args.device):
        return 2
    begin, device = time.perf_counter(), torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        compile_all()
        print(f"compiled after {time.perf_counter() - begin:.0f} s", flush=True)
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    rows: list[dict[str, Any]] = []
    clock = Clock(device)
    with torch.inference_mode():
        for inputs, outputs in ((64, 96),) if args.small else SHAPES:
            for m in (40,) if args.small else ROWS:
                found = measured(clock, m, inputs, outputs, 1 if args.small else args.rounds)
                rows += found
                print(found[0]["case"])
                for row in found:
                    numbers = (
                        "".join(f"{row[key]:{width}}" for key, width in WIDTHS.items()) if "seconds" in row else ""
                    )
                    print(f"  {row['name']:34}{numbers}{row.get('error', '')}", flush=True)
                if args.json:
                    write(args.json, "gpu-eight", rows)
    print(f"{time.perf_counter() - begin:.0f} s")
    return 0


WIDTHS = {"seconds": "12.6f", "ratio": "8.3f", "rate": "8.0f", "call_us": "8.0f"}

if __name__ == "__main__":
    sys.exit(main())

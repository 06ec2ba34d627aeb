"""Balanced offload on a card: a step against the larger of computing and of what must come to the card (G22, G23).

    python -m bench.gpu_offload                                Flux of 12 billion random weights, bf16 and nf4
    python -m bench.gpu_offload --device cpu --size 128        the same steps without a card; its numbers mean nothing

The model is that of `bench.gpu_flux`, and so are the image and the text. For each format: steps with all weights on the
card, then with balanced offload and a budget of a part of them, then again with all of them there.
    rate      bytes a second from pinned memory to the card, measured first
    ratio     seconds of a step / the larger of a step with all weights there and bytes that a step fetches / rate
    against   seconds of a step / a step with all weights there
Without a CUDA device it says so, and exits with 2.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench._cards import present
from bench._results import write
from bench.gpu_flux import DOUBLE, HEAD, IMAGE, SINGLE, TEXT, WIDTH, Replace, inputs, made
from bench.linear_peers import packed
from sdquant import offload
from sdquant.errors import BudgetError
from sdquant.nn import quantized_layer

RESULTS = Path(__file__).parent / "results" / "gpu-offload.json"
SCHEMES = (None, "nf4")
SHARES = (0.25, 0.5, 0.75)  # of the weights: the budget
COPIED = 1 << 30  # bytes that the rate is measured with
G22, G23 = 1.05, 1.10


def waited(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Median of a step's wall time, the first one left out."""
    times = []
    for _ in range(rounds + 1):
        waited(device)
        begin = time.perf_counter()
        step()
        waited(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def rate(device: torch.device) -> float:
    """Bytes a second from the host's memory, pinned where there is a card."""
    size = COPIED if device.type == "cuda" else COPIED >> 6
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return size / seconds(lambda: there.copy_(host, non_blocking=True), device, 5)


def rows(
    scheme: str | None, args: argparse.Namespace, device: torch.device, *, replace: Replace | None = None,
    shares: tuple[float, ...] = SHARES,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One format: a row for each budget. replace: what puts a layer in a linear one's place, else it is encoded."""
    if scheme is not None and replace is None:
        replace = lambda layer: quantized_layer(layer, packed(layer, scheme))  # noqa: E731
    model = made(replace, args.size, args.double, args.single, device)
    given = inputs(model, args.image, args.text, device)

    def step() -> Any:
        return model(**given, return_dict=False)[0]

    size, come = offload.weight_bytes(model), rate(device)
    before = seconds(step, device, args.rounds)
    for share in shares:
        with tempfile.TemporaryDirectory() as folder:
            try:
                handle = offload.apply(model, "balanced", device=device, budget=int(share * size), folder=folder)
            except BudgetError as error:  # a block is larger than this part of the model
                print(f"{scheme or 'bf16'}, budget {share:.0%}: {error}", flush=True)
                continue
            try:
                step()
                fetched = handle.counters.fetched
                step()
                fetched = handle.counters.fetched - fetched
                taken = seconds(step, device, args.rounds)
                peak = handle.report()["peak"]
            finally:
                handle.remove()
        model.to(device)
        after = seconds(step, device, args.rounds)
        resident = (before + after) / 2
        yield {
            "name": f"{scheme or 'bf16'}, budget {share:.0%}", "case": f"Flux {args.size}", "format": scheme or "",
            "seconds": taken, "resident_seconds": [before, after], "weights": size, "peak": peak,
            "read_per_step": fetched, "rate": come, "ratio": taken / max(resident, fetched / come),
            "against": taken / resident,
        }  # fmt: skip
        before = after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=int, default=WIDTH, help=f"the width of the model (default {WIDTH}, Flux)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help=f"the file to write (default on a card: {RESULTS.name})")
    args = parser.parse_args()
    if not present(args.device):
        return 2
    device, small = torch.device(args.device), args.size < WIDTH
    args.size = max(HEAD, args.size // HEAD * HEAD)
    args.double, args.single = (2, 16) if small else (DOUBLE, SINGLE)
    args.image, args.text = (16, 8) if small else (IMAGE, TEXT)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for scheme in SCHEMES:
            for row in rows(scheme, args, device):
                found.append(row)
                print(
                    f"{row['name']:18} {row['seconds'] * 1e3:9.1f} ms  reads {row['read_per_step'] / 1e6:8.1f} MB at"
                    f" {row['rate'] / 1e9:.1f} GB/s  ratio {row['ratio']:.3f}  against resident {row['against']:.3f}",
                    flush=True,
                )
            gc.collect()
    for row in found if device.type == "cuda" else ():
        print(f"G22 {'met' if row['ratio'] <= G22 else 'MISSED'}: {row['name']} {row['ratio']:.3f} of {G22}")
        if row["format"] == "nf4":
            print(f"G23 {'met' if row['against'] <= G23 else 'MISSED'}: {row['name']} {row['against']:.3f} of {G23}")
    path = args.json or (RESULTS if device.type == "cuda" else None)
    if path is not None:
        write(path, "gpu-offload", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Memory that is foretold against memory that a process then takes, of a Flux transformer with random weights.

    python -m bench.plan_memory

Each row is a process of its own: the transformer of `bench.offload`, 2048 wide (3.2 GB in bfloat16), is made, packed
and offloaded, and makes two steps. What the process alone holds (RssAnon, every 2 ms) less what it held with a tiny
transformer that has made a step, which the libraries themselves take, is held against
    weights on the device at once + activations by a trace of shapes + the largest quantized weight, decoded.

Twice: with the C library giving back what is freed (`measured`), and as it is by itself (`as_it_is`). glibc keeps freed
memory below 32 MB for the next one who asks, and until 2.38 often cannot use it then, since torch asks for aligned
memory (glibc's bug 14581): a process then holds two to three times its activations. RETURNING, in the environment, has
it give back pieces above 1 MB at once, at the price of a slower step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .fidelity import machine, versions
from .offload import build, step

RESULTS = Path(__file__).parent / "results" / "plan_memory.json"
TOKENS = (1024,)  # of the image: more rows than are multiplied without decoding the weight
HIDDEN = 2048  # the width
RETURNING = {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={1 << 20}"}
# Scheme, and the budget's share of the weights; None: everything in memory.
ROWS = ((None, None), (None, 0.5), (None, 0.25), ("int8", None), ("int8", 0.5), ("nf4", None))


def anonymous() -> int:
    """Bytes that this process alone holds, and that no file backs."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


class Watch(threading.Thread):
    """Follows `anonymous` until it is left."""

    peak, on = 0, True

    def run(self) -> None:
        while self.on:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.002)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False
        self.join()


def measure(scheme: str | None, share: float | None, tokens: int) -> dict[str, Any]:
    """One row, in this process."""
    import torch

    import sdquant
    from sdquant import activations, offload
    from sdquant.memory import give_back
    from sdquant.weights import quantized

    torch.set_num_threads(1)
    small = build(hidden=64, layers=(1, 1))
    if scheme is not None:
        sdquant.quantize(small, scheme, runtime="plain")
    step(small, tokens=64)()
    del small
    # Before the floor, since it imports much.
    peak = step(build(HIDDEN, meta=True), tokens=tokens, through=activations.peak_of)()
    give_back()
    floor = anonymous()
    net = build(HIDDEN)
    if scheme is not None:
        sdquant.quantize(net, scheme, runtime="plain")
    give_back()
    size = offload.weight_bytes(net)
    budget = None if share is None else int(share * size)
    call = step(net, tokens=tokens)
    decoded = max((2 * packed.spec.shape[0] * packed.spec.shape[1] for _, packed in quantized(net)), default=0)
    with tempfile.TemporaryDirectory() as folder:
        handle = offload.apply(
            net, "none" if budget is None else "balanced", device="cpu", budget=budget, folder=folder
        )
        give_back()
        with Watch() as watch:
            for _ in range(2):
                call()
        weights = handle.report()["peak"]
        handle.remove()
    foretold = weights + peak + decoded
    measured = watch.peak - floor
    return {
        "scheme": scheme, "budget_share": share, "tokens": tokens, "all_weights": size, "weights": weights,
        "activations": peak, "decoded": decoded, "foretold": foretold, "measured": measured,
        "ratio": foretold / measured,
    }  # fmt: skip


def _run(words: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | environment)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        print(json.dumps(measure(*json.loads(args.row))))
        return
    rows = []
    for tokens in TOKENS:
        for scheme, share in ROWS:
            words = [sys.executable, "-m", "bench.plan_memory", "--row", json.dumps([scheme, share, tokens])]
            plain, last = (_run(words, environment) for environment in ({}, RETURNING))
            rows.append(last | {"as_it_is": plain["measured"]})
            print(
                f"{scheme or 'bf16':6} budget {share or 1:4.0%}  {tokens:5} tokens  foretold"
                f" {last['foretold'] / 1e6:7.1f} MB  measured {last['measured'] / 1e6:7.1f} MB  {last['ratio']:.3f}"
                f"  as it is {plain['measured'] / 1e6:7.1f} MB",
                flush=True,
            )
    args.out.write_text(json.dumps({"machine": machine(), "versions": versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

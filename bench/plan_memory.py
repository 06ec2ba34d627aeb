"""Memory that is foretold against memory that a process then takes, of networks with random weights.

    python -m bench.plan_memory

Each row is a process of its own: a network (the Flux transformer of `bench.offload`, 2048 wide, 3.2 GB in bfloat16, at
1024 tokens; the UNet of SD1.5, 1.7 GB, at 512x512 with guidance) is made, packed and offloaded, and makes two steps.
What the process alone holds (RssAnon, every 2 ms) less what it held with a tiny network of the kind that has made a
step, which the libraries themselves take, is held against
    weights on the device at once + activations by a trace of shapes + the largest quantized weight, decoded
    + what oneDNN keeps of its kernels + freed memory that may be held.

Quantized networks are quantized in place, which leaves more holes in the C library's heap than loading does. Then steps
are made in turns with and without `sdquant.utils.malloc_trim`: `unwatched` is what the process holds without it,
and `step` the time of a step with it over that without (medians).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import offload as flux
from ._results import write
from .models import MODELS

RESULTS = Path(__file__).parent / "results" / "plan_memory.json"
HIDDEN, TOKENS = 2048, 1024  # Flux's width and the image's tokens: more than are multiplied without decoding
ROUNDS = 3  # of steps in turns
SIDE = 512  # of the UNet's image in pixels
TINY = {"block_out_channels": [32, 32, 32, 32], "cross_attention_dim": 32}
# Network, scheme, and the budget's share of the weights; None: everything in memory.
ROWS = (
    ("flux", None, None), ("flux", None, 0.5), ("flux", None, 0.25),
    ("flux", "int8", None), ("flux", "int8", 0.5), ("flux", "nf4", None),
    ("sd15", None, None), ("sd15", None, 0.5), ("sd15", "int8", None), ("sd15", "int8", 0.7), ("sd15", "nf4", None),
)  # fmt: skip


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


def unet(*, tiny: bool = False, meta: bool = False) -> Any:
    """The UNet of SD1.5, the same at each call; `meta`: without weights."""
    import torch

    from sdquant.models import components

    config = dict(MODELS["sd15"].config) | (TINY if tiny else {})
    net = components.empty("diffusers", config["_class_name"], config).to(torch.bfloat16)
    if meta:
        return net
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net = net.to_empty(device="cpu")
    random = torch.Generator().manual_seed(0)
    for weight in net.parameters():
        if weight.ndim == 1:
            weight.fill_(1)
        else:
            weight.normal_(std=weight[0].numel() ** -0.5, generator=random)
    for name, buffer in net.named_buffers():
        buffer.copy_(buffers[name])
    return net


def unet_step(net: Any, side: int, through: Callable[..., Any] | None = None) -> Callable[[], Any]:
    """What makes one step of two rows, as guidance has it; `through` as in `bench.offload.step`."""
    import torch

    from sdquant.models import dummy_inputs

    _, given = dummy_inputs.random(type(net).__name__, net.config, (side, side), 2, seed=1)
    given = dummy_inputs.moved(given, torch.device("cpu"), torch.bfloat16)

    def call() -> Any:
        with torch.no_grad():
            return net(**given) if through is None else through(net, **given)

    return call


def network(name: str, *, tiny: bool = False, through: Callable[..., Any] | None = None) -> tuple[Any, Any]:
    """A network and what makes its step; on the meta device where that goes `through` something."""
    meta = through is not None
    if name == "flux":
        net = flux.build(64, (1, 1)) if tiny else flux.build(HIDDEN, meta=meta)
        return net, flux.step(net, tokens=64 if tiny else TOKENS, through=through)
    net = unet(tiny=tiny, meta=meta)
    return net, unet_step(net, 64 if tiny else SIDE, through)


def without_looking(call: Callable[[], Any]) -> tuple[int, float]:
    """What the process holds at the most if nobody looks after its heap, and a step's time over that without."""
    from sdquant.utils import malloc_trim

    times: dict[bool, list[float]] = {False: [], True: []}
    peak, looks = 0, malloc_trim._looks
    try:
        for _ in range(ROUNDS):
            for looking in times:
                malloc_trim._looks = looks if looking else lambda: False  # type: ignore[assignment]
                with Watch() as watch:
                    start = time.perf_counter()
                    call()
                    times[looking].append(time.perf_counter() - start)
                peak = peak if looking else max(peak, watch.peak)
    finally:
        malloc_trim._looks = looks
    return peak, statistics.median(times[True]) / statistics.median(times[False])


def measure(name: str, scheme: str | None, share: float | None) -> dict[str, Any]:
    """One row, in this process."""
    import torch

    import sdquant
    from sdquant import offload
    from sdquant.models import activation_memory
    from sdquant.nn.weights import quantized
    from sdquant.utils import malloc_trim
    from sdquant.utils.buffers import give_back

    torch.set_num_threads(1)
    small, call = network(name, tiny=True)
    if scheme is not None:
        sdquant.quantize(small, scheme, runtime="plain", progress=False)
    call()
    del small, call
    trace = network(name, through=activation_memory.trace_of)[1]()  # before the floor, since it imports much
    give_back()
    floor = anonymous()
    net, call = network(name)
    if scheme is not None:
        sdquant.quantize(net, scheme, runtime="plain", progress=False)
    give_back()
    size = offload.weight_bytes(net)
    budget = None if share is None else int(share * size)
    decoded = max((2 * math.prod(packed.spec.shape) for _, packed in quantized(net)), default=0)
    with tempfile.TemporaryDirectory() as folder:
        handle = offload.apply(
            net, "none" if budget is None else "balanced", device="cpu", budget=budget, folder=folder
        )
        give_back()
        with Watch() as watch:
            for _ in range(2):
                call()
        weights = handle.report()["peak"]
        unwatched, step = without_looking(call)
        handle.remove()
    used = weights + trace.peak + decoded + trace.kernels
    foretold = used + malloc_trim.spare(used)
    measured = watch.peak - floor
    return {
        "name": scheme or "bf16", "case": f"{name}, budget {share or 1:.0%}",
        "network": name, "scheme": scheme, "budget_share": share, "all_weights": size, "weights": weights,
        "activations": trace.peak, "decoded": decoded, "kernels": trace.kernels, "foretold": foretold,
        "measured": measured, "unwatched": unwatched - floor, "step": step,
        "of_measured": foretold / measured, "missed": abs(foretold / measured - 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        print(json.dumps(measure(*json.loads(args.row))))
        return
    rows = []
    for name, scheme, share in ROWS:
        words = [sys.executable, "-m", "bench.plan_memory", "--row", json.dumps([name, scheme, share])]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        print(
            f"{name:6} {scheme or 'bf16':6} budget {share or 1:4.0%}  foretold {row['foretold'] / 1e6:7.1f} MB"
            f"  measured {row['measured'] / 1e6:7.1f} MB  {row['of_measured']:.3f}"
            f"  unwatched {row['unwatched'] / 1e6:7.1f} MB  step {row['step']:.3f}",
            flush=True,
        )
    write(args.out, "plan_memory", rows)


if __name__ == "__main__":
    main()

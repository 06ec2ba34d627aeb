"""What a compiled OpenVINO model takes in memory, beside the packed weights that it was made from.

    python -m bench.openvino_memory [--hidden 1536] [--out bench/results/openvino_memory.json]

Each case in a process of its own: RssAnon after the second call less that before the first, of runtime="openvino" and
of runtime="plain"; OpenVINO is imported and has compiled a small model before. Weights by kind, as packed bytes and as
numbers, tell what the copy is made of.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench._results import write

RESULTS = Path(__file__).parent / "results" / "openvino_memory.json"
MODELS = ("digits-sd", "digits-flux", "wide-flux", "wide-unet")
DTYPES = ("float32", "bfloat16")


def anonymous() -> int:
    """Bytes of this process's memory that are no file's, with what the allocator could give back given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def model_of(name: str, dtype: torch.dtype, hidden: int) -> tuple[Any, dict[str, Any]]:
    """A model and its inputs."""
    import sdquant
    from bench.openvino_runtime import flux_inputs, unet_inputs, wide_flux
    from sdquant import demo

    if name in demo.MODELS:
        pipe = sdquant.load_model(demo.path(name), dtype=str(dtype).removeprefix("torch."), progress=False)
        return (pipe.unet, unet_inputs(dtype)) if name == "digits-sd" else (
            pipe.transformer, flux_inputs(dtype, 16, 512, 128, 16)
        )  # fmt: skip
    if name == "wide-flux":
        return wide_flux(hidden).to(dtype), flux_inputs(dtype, 64, 64, hidden, 64)
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(320, 640), cross_attention_dim=128, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return unet.to(dtype), unet_inputs(dtype)


def bytes_by_kind(model: nn.Module) -> dict[str, dict[str, int]]:
    """Of the quantized weights, packed and as numbers, and of how many layers: "linear", "point" (convolutions of size
    1) and "conv"."""
    import math

    from sdquant.nn.weights import quantized

    found = {kind: {"packed": 0, "numbers": 0, "layers": 0} for kind in ("linear", "point", "conv")}
    for _, packed in quantized(model):
        shape = packed.spec.shape
        kind = "linear" if len(shape) == 2 else "point" if math.prod(shape[2:]) == 1 else "conv"
        found[kind]["packed"] += packed.nbytes
        found[kind]["numbers"] += math.prod(shape)
        found[kind]["layers"] += 1
    return found


def one(name: str, dtype: str, scheme: str, runtime: str, hidden: int) -> dict[str, Any]:
    """In this process: what two calls add."""
    import sdquant

    torch.set_num_threads(1)
    small = nn.Sequential(nn.Linear(64, 64))
    model, inputs = model_of("digits-sd", torch.float32, hidden)
    warm = sdquant.quantize(model, "int8", runtime=runtime, progress=False)
    with torch.no_grad():
        warm(**inputs)
    del warm, model, small
    model, inputs = model_of(name, getattr(torch, dtype), hidden)
    held = sdquant.quantize(model.eval().requires_grad_(False), scheme, runtime=runtime, progress=False)
    del model
    before = anonymous()
    with torch.no_grad():
        for _ in range(2):
            held(**inputs)
    after = anonymous()
    return {
        "added": after - before, "weights": sdquant.offload.weight_bytes(held), "kinds": bytes_by_kind(held),
        "floats": sum(p.nbytes for n, p in held.named_parameters() if "packed_" not in n),
    }  # fmt: skip


def main() -> None:
    """Measure each case in a new process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--only", action="append", choices=MODELS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*args.one, args.hidden)))
        return
    rows = []
    for name in args.only or MODELS:
        for dtype in DTYPES:
            for scheme in ("int8", "int4"):
                for runtime in ("plain", "openvino"):
                    words = [sys.executable, "-m", "bench.openvino_memory", "--hidden", str(args.hidden)]
                    done = subprocess.run(
                        [*words, "--one", name, dtype, scheme, runtime], capture_output=True, text=True
                    )
                    if done.returncode:
                        print(done.stderr[-400:])
                        continue
                    found = json.loads(done.stdout.splitlines()[-1])
                    case = f"{name} {args.hidden} {dtype}" if name == "wide-flux" else f"{name} {dtype}"
                    rows.append({"name": f"{scheme} · {runtime}", "case": case, "dtype": dtype, **found})
                    print(name, dtype, scheme, runtime, {k: v for k, v in found.items() if k != "kinds"}, flush=True)
    write(args.out, "openvino memory", rows)


if __name__ == "__main__":
    main()

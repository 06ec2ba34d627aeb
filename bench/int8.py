"""What compute="int8" costs and gives on whole models: errors on the shipped ones, the time of SDXL's UNet by parts.

    OMP_NUM_THREADS=1 python -m bench.int8 --errors     one step's SNR and digits read right, with and without
    OMP_NUM_THREADS=1 python -m bench.int8 --sdxl       the layers of a step at 1024 x 1024, against bf16
    OMP_NUM_THREADS=1 python -m bench.int8              both

What is run is kept: bench/results/int8.json, and int8-sdxl-INSTRUCTIONS.json of the machine's instruction set.

Errors are against the unquantized model in its own dtype. For the time, every shape of layer that a step has runs by
itself with random numbers, bf16 and int8_sym with compute="int8" in turns, CPU time of one thread, medians; times are
multiplied by how often the shape occurs, which a run on the meta device counts. Norms are those of bf16.
Times of single linear layers are in bench.linear (--integers).
"""

from __future__ import annotations

import argparse
import collections
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench._results import write
from bench.fidelity import one_step
from sdquant import backends, demo, load_model
from sdquant.kernels.cpu import isa
from sdquant.kernels.sdpa import attended
from sdquant.nn import quantized_layer

RESULTS = Path(__file__).parent / "results" / "int8.json"
TIMES = RESULTS.with_name(f"int8-sdxl-{isa() or 'torch'}.json")
SCHEMES = ("int8", "int8_sym", "qint8", "bnb-int8", "sdnq-int8", "int4", "qint4", "nf4", "sdnq-uint4", "fp8")
IMAGES = 50
STEPS = 8
GATE = 0.65  # of the bf16 step
SDXL: dict[str, Any] = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2,
    "cross_attention_dim": 2048,
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}


def decibels(found: Any, exact: Any) -> float:
    """Signal to noise."""
    noise = ((found - exact) ** 2).mean()
    return round(10 * math.log10((exact**2).mean() / noise), 2) if noise else math.inf


def errors(model: str, images: int) -> list[dict[str, Any]]:
    """A row for each scheme and way to compute."""
    from sdquant.models.generate import draw
    from sdquant.training import digits

    wanted = [i % 10 for i in range(images)]

    def right(pipe: Any) -> int:
        pictures = []
        for start in range(0, images, 10):
            part = range(start, min(start + 10, images))
            pictures += draw(pipe, [digits.prompt(wanted[i]) for i in part], seeds=part, steps=STEPS, batch=10)
        return sum(a == b for a, b in zip(wanted, digits.judge().read(pictures), strict=True))

    plain = load_model(demo.path(model), progress=False)
    exact = one_step(plain, model)
    rows: list[dict[str, Any]] = [
        {"name": "unquantized", "case": model, "snr": None, "right": right(plain), "of": images}
    ]
    for scheme in SCHEMES:
        for compute in ("float", "int8"):
            pipe = load_model(demo.path(model), scheme, runtime="plain", compute=compute, progress=False)
            name = scheme if compute == "float" else f"{scheme} compute=int8"
            row = {"name": name, "case": model, "snr": decibels(one_step(pipe, model), exact)}
            rows.append({**row, "right": right(pipe), "of": images})
            print(rows[-1], flush=True)
    return rows


def shapes() -> collections.Counter[tuple[Any, ...]]:
    """The linears and convolutions of a step, and how often each runs."""
    from diffusers import UNet2DConditionModel

    found: collections.Counter[tuple[Any, ...]] = collections.Counter()

    def count(module: Any, given: Any, _: Any) -> None:
        x = given[0]
        if isinstance(module, nn.Linear):
            found["linear", x.numel() // x.shape[-1], module.in_features, module.out_features] += 1
        else:
            size = module.in_channels, module.out_channels, module.kernel_size[0], module.stride[0]
            found[("conv", x.shape[-1], *size)] += 1

    with torch.device("meta"):
        net = UNet2DConditionModel(**SDXL).to(torch.bfloat16)
        for module in net.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.register_forward_hook(count)
        more = {"text_embeds": torch.empty(1, 1280), "time_ids": torch.empty(1, 6)}
        net(
            torch.empty(1, 4, 128, 128, dtype=torch.bfloat16),
            torch.empty(()),
            torch.empty(1, 77, 2048, dtype=torch.bfloat16),
            added_cond_kwargs={name: value.to(torch.bfloat16) for name, value in more.items()},
        )
    return found


def medians(runs: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """Seconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items() if number % 2 else reversed(runs.items()):
            start = time.thread_time()
            run()
            if number:
                times[name].append(time.thread_time() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def layer_times(shape: tuple[Any, ...]) -> dict[str, float]:
    """bf16's and int8's seconds."""
    kind, size, *rest = shape
    module: Any
    if kind == "linear":
        module, x = nn.Linear(rest[0], rest[1], dtype=torch.bfloat16), torch.randn(size, rest[0]).bfloat16()
    else:
        into, out, kernel, stride = rest
        module = nn.Conv2d(into, out, kernel, stride, kernel // 2, dtype=torch.bfloat16)
        x = torch.randn(1, into, size, size).bfloat16()
    backend, spec = backends.of_scheme("int8_sym"), backends.parse("int8_sym")
    layer = quantized_layer(module, backend.encode(module.weight.data, spec), compute="int8")
    return medians({"bf16": lambda: module(x), "int8": lambda: layer(x)})


def attention() -> dict[str, float]:
    """bf16's and int8's seconds in a step."""
    total = {"bf16": 0.0, "int8": 0.0}
    for heads, length, of, times in (
        (10, 4096, 4096, 10),
        (10, 4096, 77, 10),
        (20, 1024, 1024, 60),
        (20, 1024, 77, 60),
    ):
        # In memory as projections leave them.
        q, k = (torch.randn(1, n, heads, 64).bfloat16().transpose(1, 2) for n in (length, of))

        def plain(q: torch.Tensor = q, k: torch.Tensor = k) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, k)

        def own(q: torch.Tensor = q, k: torch.Tensor = k) -> torch.Tensor:
            found = attended(q, k, k)
            return plain(q, k) if found is None else found

        for name, seconds in medians({"bf16": plain, "int8": own}, 3).items():
            total[name] += times * seconds
    return total


def others() -> float:
    """Seconds of what stays as it is, in a step: norms and gated units."""
    f, half, total = nn.functional, torch.bfloat16, 0.0
    for channels, size, times in ((320, 128, 10), (640, 64, 16), (1280, 32, 14), (960, 128, 2)):
        x, group = torch.randn(1, channels, size, size, dtype=half), nn.GroupNorm(32, channels, dtype=half)
        total += times * medians({"": lambda x=x, g=group: f.silu(g(x))}, 3)[""]  # type: ignore[misc]
    for width, length, times in ((640, 4096, 30), (1280, 1024, 180)):
        x, norm = torch.randn(1, length, width, dtype=half), nn.LayerNorm(width, dtype=half)
        total += times * medians({"": lambda x=x, n=norm: n(x) + x}, 3)[""]  # type: ignore[misc]
    for width, length, times in ((2560, 4096, 10), (5120, 1024, 60)):
        x = torch.randn(1, length, 2 * width, dtype=half)

        def gate(x: torch.Tensor = x) -> torch.Tensor:
            a, b = x.chunk(2, -1)
            return a * f.gelu(b)

        total += times * medians({"": gate}, 3)[""]
    return total


def sdxl() -> list[dict[str, Any]]:
    """A row for each part of a step, and for the whole."""
    total: dict[str, dict[str, float]] = {}
    for shape, times in sorted(shapes().items()):
        found = layer_times(shape)
        print(shape, times, f"{found['int8'] / found['bf16']:.2f}", flush=True)
        part = total.setdefault("linears" if shape[0] == "linear" else "convolutions", {"bf16": 0.0, "int8": 0.0})
        for name, seconds in found.items():
            part[name] += times * seconds
    same = others()
    total |= {"attention": attention(), "norms and gates": {"bf16": same, "int8": same}}
    total["step"] = {way: sum(part[way] for part in total.values()) for way in ("bf16", "int8")}
    return [
        {
            "name": name,
            "case": "SDXL UNet 1024x1024, int8_sym compute=int8 against bf16",
            "seconds": {way: round(seconds, 3) for way, seconds in part.items()},
            "share": round(part["bf16"] / total["step"]["bf16"], 3),
            "ratio": round(part["int8"] / part["bf16"], 3),
        }
        for name, part in total.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", action="store_true", help="only these")
    parser.add_argument("--sdxl", action="store_true", help="only this")
    parser.add_argument("--images", type=int, default=IMAGES, help="images of each model and scheme")
    args = parser.parse_args()
    torch.set_num_threads(1)
    both = args.errors == args.sdxl
    with torch.no_grad():
        if both or args.sdxl:
            rows = sdxl()
            for row in rows:
                print(row)
            whole = rows[-1]["ratio"]
            print(f"step: {whole} of bf16, {'within' if whole <= GATE else 'misses'} {GATE}")
            write(TIMES, "int8-sdxl", rows)
        if both or args.errors:
            write(RESULTS, "int8", [row for model in demo.MODELS for row in errors(model, args.images)])


if __name__ == "__main__":
    main()

"""One denoising step with runtime="openvino" beside the plain runtime and the unquantized model, on the CPU.

    python -m bench.openvino_runtime [--hidden 1536] [--tokens 1024] [--rounds 9] [--out bench/results/openvino.json]

Models: the UNet and the transformer that are shipped, and a Flux transformer of two double and two single blocks with
random weights at a real width. Variants run in turn, forwards in even rounds and backwards in odd ones. Times are CPU
seconds of the process (OpenVINO computes in threads of its own), one thread each, medians; what counts is the ratio to
the unquantized model in the same dtype. "first" is the wall time of the first call, in which OpenVINO traces, converts
and compiles.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import sdquant
from sdquant import demo

from ._results import write

warnings.filterwarnings("ignore")
VARIANTS: tuple[tuple[str, str | None, str | None], ...] = (
    ("unquantized", None, None),
    ("plain int8", "int8", "plain"),
    ("openvino int8", "int8", "openvino"),
    ("plain int4", "int4", "plain"),
    ("openvino int4", "int4", "openvino"),
)


def unet_inputs(dtype: torch.dtype) -> dict[str, Any]:
    """Two images of the shipped UNet's size, and their prompts."""
    make = torch.Generator().manual_seed(0)
    return {
        "sample": torch.randn(2, 4, 8, 8, generator=make).to(dtype),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(2, 77, 128, generator=make).to(dtype),
    }


def flux_inputs(dtype: torch.dtype, image: int, text: int, width: int, channels: int) -> dict[str, Any]:
    """`image` and `text` tokens of one picture; `width` is of the text."""
    make = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, image, channels, generator=make).to(dtype),
        "encoder_hidden_states": torch.randn(1, text, width, generator=make).to(dtype),
        "pooled_projections": torch.randn(1, width, generator=make).to(dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "guidance": torch.tensor([3.5]),
        "txt_ids": torch.zeros(text, 3, dtype=dtype),
        "img_ids": torch.zeros(image, 3, dtype=dtype),
    }


def wide_flux(hidden: int) -> Any:
    """Two double and two single blocks."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=2, num_single_layers=2, attention_head_dim=128,
        num_attention_heads=hidden // 128, joint_attention_dim=hidden, pooled_projection_dim=hidden,
        guidance_embeds=True, axes_dims_rope=(16, 56, 56),
    )  # fmt: skip


def quantized(model: Any, scheme: str | None, runtime: str | None) -> Any:
    """The model as this variant has it."""
    return model if scheme is None else sdquant.quantize(model, scheme, runtime=runtime, progress=False)


def measure(name: str, load: Callable[[], Any], inputs: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """All variants of one model in one dtype."""
    models: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for label, scheme, runtime in VARIANTS:
        gc.collect()
        model = quantized(load().eval().requires_grad_(False), scheme, runtime)
        begin = time.perf_counter()
        with torch.no_grad():
            answer = model(**inputs).sample.double()
        first = time.perf_counter() - begin
        rows[label] = {"name": label, "case": name, "first_s": first, "bytes": sdquant.offload.weight_bytes(model)}
        models[label] = (model, answer)
    times: dict[str, list[float]] = {label: [] for label in models}
    for turn in range(rounds):
        for label in list(models)[:: 1 if turn % 2 == 0 else -1]:
            begin = time.process_time()
            with torch.no_grad():
                models[label][0](**inputs)
            times[label].append(time.process_time() - begin)
    whole = statistics.median(times["unquantized"])
    for label, row in rows.items():
        base = models["plain " + label.split()[1]][1] if label.startswith("openvino") else models["unquantized"][1]
        noise = float((models[label][1] - base).pow(2).sum())
        row["cpu_s"] = statistics.median(times[label])
        row["ratio"] = row["cpu_s"] / whole
        if noise:
            row["snr"] = 10 * float(torch.log10(base.pow(2).sum() / noise))
        print(
            f"{name:24} {label:14} first {row['first_s']:6.2f} s  {row['bytes'] / 1e6:7.1f} MB"
            f"  {row['cpu_s']:.4f} s  {row['ratio']:.3f}" + (f"  {row['snr']:.1f} dB" if noise else ""),
            flush=True,
        )
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--tokens", type=int, default=1024, help="of the image; the text has a quarter of them")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "openvino.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wide = wide_flux(args.hidden)
    found: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        word = str(dtype).removeprefix("torch.")
        for model in ("digits-sd", "digits-flux"):
            inputs = unet_inputs(dtype) if model == "digits-sd" else flux_inputs(dtype, 16, 512, 128, 16)

            def shipped(model: str = model, word: str = word) -> Any:
                pipe = sdquant.load_model(demo.path(model), dtype=word, progress=False)
                return pipe.unet if model == "digits-sd" else pipe.transformer

            found += measure(f"{model} {word}", shipped, inputs, 3 * args.rounds)
        inputs = flux_inputs(dtype, args.tokens, args.tokens // 4, args.hidden, 64)
        name = f"flux {args.hidden} x {args.tokens} {word}"
        found += measure(name, lambda dtype=dtype: copy.deepcopy(wide).to(dtype), inputs, args.rounds)
    more = {"threads": 1, "clock": "process CPU time, medians, interleaved", "openvino": metadata.version("openvino")}
    write(args.out, "openvino_runtime", found, **more)


if __name__ == "__main__":
    main()

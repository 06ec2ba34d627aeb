"""A whole Flux transformer of 12 billion random weights on a card: time and memory of a step, beside peers (G20, G21).

    python -m bench.gpu_flux                                   plain bf16, formats and peers, one after the other
    python -m bench.gpu_flux --only nf4 --compile              torch.compile of each block, too
    python -m bench.gpu_flux --device cpu --size 64            the same steps without a card; its numbers mean nothing

The model is made on the card block by block, each quantized before the next is made, so that no more than one block is
in floats. A step is that of a 1024 x 1024 image: 4096 tokens of it, 512 of text. CUDA events, medians; every variant is
measured in the same process, between two runs of plain bf16, whose distance is `drift`. `peak` is torch's.
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

from bench._cards import OURS, PLAIN, Clock, peers, present
from bench._results import write
from bench.linear_peers import packed
from sdquant.nn import quantized_layer
from sdquant.utils.inference_mode import ordinary

RESULTS = Path(__file__).parent / "results" / "gpu-flux.json"
SCHEMES = ("nf4", "bnb-int8", "qint8", "int8_sym", "fp8,packing=float8", "q8_0", "q4_k", "sdnq-int8")
HEAD = 128  # numbers in an attention head
WIDTH = 3072
DOUBLE, SINGLE = 19, 38
IMAGE, TEXT = 4096, 512  # tokens
WORST = {"nf4": 1.06, "q8_0": 1.25, "q4_k": 1.25}
OTHERS = 1.10

Replace = Callable[[nn.Linear], nn.Module]


def empty(width: int, double: int, single: int) -> nn.Module:
    """The transformer on the meta device in bfloat16, in the width of FLUX.1 or a smaller one."""
    from diffusers import FluxTransformer2DModel

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # diffusers' own `to` warns of modules that there are none of
    with torch.device("meta"):
        model: nn.Module = FluxTransformer2DModel(
            patch_size=1, in_channels=64, num_layers=double, num_single_layers=single, attention_head_dim=HEAD,
            num_attention_heads=max(1, width // HEAD), joint_attention_dim=4096 * width // WIDTH,
            pooled_projection_dim=768, guidance_embeds=True, axes_dims_rope=(16, 56, 56),
        )  # fmt: skip
    torch.set_default_dtype(before)
    return model.requires_grad_(False).eval()


@ordinary
def made(replace: Replace | None, width: int, double: int, single: int, device: torch.device) -> nn.Module:
    """The same on the device with random weights, the linear layers of its blocks as `replace` makes them."""
    model = empty(width, double, single)
    torch.manual_seed(0)
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]  # type: ignore[misc]
    for block in blocks:
        _fill(block, device)
        if replace is not None:
            for name, layer in [one for one in block.named_modules() if isinstance(one[1], nn.Linear)]:
                parent, _, own = name.rpartition(".")
                setattr(block.get_submodule(parent), own, replace(layer))
    _fill(model, device)  # what is still on meta: what stands before and after the blocks
    return model


def _fill(module: nn.Module, device: torch.device) -> None:
    """Random numbers for what is on meta: N(0, 1 / inputs) for weights, ones for norms, zeros for biases."""
    for name, parameter in list(module.named_parameters()):
        if not parameter.is_meta:
            continue
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if values.ndim > 1:
            values.normal_(0, values[0].numel() ** -0.5)
        else:
            values.fill_(1.0 if name.endswith("weight") else 0.0)
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, nn.Parameter(values, requires_grad=False))


def inputs(model: Any, image: int, text: int, device: torch.device) -> dict[str, Tensor]:
    """One step's arguments, random."""
    config, side = model.config, int(image**0.5)
    torch.manual_seed(1)
    places = torch.zeros(side, side, 3, device=device)
    places[..., 1] += torch.arange(side, device=device)[:, None]
    places[..., 2] += torch.arange(side, device=device)[None, :]
    shapes = {
        "hidden_states": (1, side * side, config.in_channels),
        "encoder_hidden_states": (1, text, config.joint_attention_dim),
        "pooled_projections": (1, config.pooled_projection_dim),
    }
    made = {name: torch.randn(shape, device=device).to(torch.bfloat16) for name, shape in shapes.items()}
    half = torch.full((1,), 0.5, device=device, dtype=torch.bfloat16)
    text_places = torch.zeros(text, 3, device=device)
    return made | {
        "timestep": half, "guidance": half * 7, "img_ids": places.reshape(-1, 3), "txt_ids": text_places,
    }  # fmt: skip


def variants(schemes: tuple[str, ...]) -> dict[str, tuple[str, Replace | None]]:
    """Name -> format and what is put in the place of a linear layer."""
    found: dict[str, tuple[str, Replace | None]] = {PLAIN: ("", None)}
    for scheme in schemes:
        found[f"{scheme} · {OURS}"] = scheme, _ours(scheme)
        for name, make in peers(scheme).items():
            if not name.startswith("torchao"):  # it makes a model of its own around each layer
                found[f"{scheme} · {name}"] = scheme, make  # type: ignore[assignment]
    found[f"{PLAIN} again"] = "", None
    return found


def _ours(scheme: str) -> Replace:
    return lambda layer: quantized_layer(layer, packed(layer, scheme))


def measured(replace: Replace | None, args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """One variant: seconds of a step, bytes of weights and at the peak, and the output."""
    device = clock.device
    if clock.card:
        torch.cuda.reset_peak_memory_stats(device)
    model = made(replace, args.size, args.double, args.single, device)
    nn.Module.to(model, device)  # buffers of peers
    loaded = torch.cuda.memory_allocated(device) if clock.card else None
    loading = torch.cuda.max_memory_allocated(device) if clock.card else None
    if clock.card:
        torch.cuda.reset_peak_memory_stats(device)
    given = inputs(model, args.image, args.text, device)

    def step() -> Tensor:
        out: Tensor = model(**given, return_dict=False)[0]
        return out

    out = step().float().cpu()
    values: dict[str, Any] = {"seconds": clock.medians({"step": step}, args.rounds)["step"]}
    if args.compile:
        for block in [*model.transformer_blocks, *model.single_transformer_blocks]:  # type: ignore[misc]
            block.compile(fullgraph=True)
        values["compiled_seconds"] = clock.medians({"step": step}, args.rounds)["step"]
    peak = torch.cuda.max_memory_allocated(device) if clock.card else None
    return values | {"bytes": loaded, "loading_peak": loading, "peak": peak, "out": out}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", type=int, default=WIDTH, help=f"the width of the model (default {WIDTH}, Flux)")
    parser.add_argument("--only", action="append", metavar="SCHEME", help="these formats alone (repeat)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="measure compiled blocks as well")
    parser.add_argument("--json", type=Path, help=f"the file to write (default on a card: {RESULTS.name})")
    args = parser.parse_args()
    if not present(args.device):
        return 2
    clock = Clock(torch.device(args.device))
    small = args.size < WIDTH
    args.size = max(HEAD, args.size // HEAD * HEAD)
    args.double, args.single = (1, 1) if small else (DOUBLE, SINGLE)
    args.image, args.text = (16, 8) if small else (IMAGE, TEXT)
    rows: list[dict[str, Any]] = []
    wanted, base, compiled = None, 0.0, 0.0
    with torch.inference_mode():
        for name, (scheme, replace) in variants(tuple(args.only or SCHEMES)).items():
            row: dict[str, Any] = {"name": name, "case": f"Flux {args.size} bf16", "format": scheme, "ratio": None}
            try:
                found = measured(replace, args, clock)
            except Exception as error:  # a peer that cannot do this, or a card that is too small: a row that says so
                rows.append(row | {"error": f"{type(error).__name__}: {error}"[:300]})
                print(f"{name:44}{rows[-1]['error']}", flush=True)
                continue
            finally:
                gc.collect()
                if clock.card:
                    torch.cuda.empty_cache()
            out = found.pop("out")
            if name == PLAIN:
                wanted, base, compiled = out, found["seconds"], found.get("compiled_seconds", 0.0)
            row |= found | {"ratio": found["seconds"] / base if base else None}
            if wanted is not None:
                row["distance"] = ((out - wanted).norm() / wanted.norm()).item()
            if compiled and "compiled_seconds" in found:
                row["compiled_ratio"] = found["compiled_seconds"] / compiled
            rows.append(row)
            ratio = f"{row['ratio']:.3f}" if row["ratio"] else "-"
            size = f"{row['bytes'] / 2**30:.2f} GiB, peak {row['peak'] / 2**30:.2f}" if row["bytes"] else ""
            print(f"{name:44}{row['seconds'] * 1e3:9.1f} ms  {ratio}  {size}", flush=True)
    for row in rows if clock.card else ():
        if row["name"].endswith(f"· {OURS}") and row["ratio"]:
            limit = WORST.get(row["format"], OTHERS)
            print(f"G20 {'met' if row['ratio'] <= limit else 'MISSED'}: {row['name']} {row['ratio']:.3f} of {limit}")
    path = args.json or (RESULTS if clock.card else None)
    if path is not None:
        write(path, "gpu-flux", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Time of a linear layer over a GGUF weight beside its peers', one thread, interleaved medians, CPU time of the thread.

    OMP_NUM_THREADS=1 python bench/gguf_linear.py [--json FILE] [--dtype bfloat16] [--kinds q8_0 q4_0 ...] [--rows 1 77]

Layers: sdquant's; diffusers' GGUFLinear; `libgguf`, ggml's own dequantization to float32, cast, and torch's product;
plain, the unquantized layer. Ratios are to plain in the same turns; turns go forwards and backwards by turns, so that a
layer finds the caches as the others leave them, and a slow minute hits all alike. Gates: G6, where its rows were run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import libgguf
import torch
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from torch import Tensor, nn
from torch.nn import functional as F

from sdquant import backends
from sdquant.formats.gguf_types import TYPES
from sdquant.kernels import native
from sdquant.layers import quantized_layer
from sdquant.machine import probe

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = ("q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "iq4_xs")
ROWS = (1, 8, 77, 256, 1024, 4608)
SHAPES = ((3072, 3072), (3072, 12288))
# G6: the most that a layer of these types may take of plain bf16, by rows, and what is aimed at.
GATED = ("q8_0", "q4_0", "q4_k")
GATES = {1: (3.0, 1.5), 77: (1.6, 1.2), 1024: (1.15, 1.03)}
MIDDLING, MANY = 1 << 30, 1 << 34  # multiplications a turn beyond which fewer turns are taken


class Libgguf(nn.Module):
    """What is fastest without code of one's own: ggml's float32 weight, cast."""

    def __init__(self, kind: str, blocks: Tensor, inputs: int) -> None:
        super().__init__()
        self.kind, self.inputs = TYPES[kind], inputs
        self.blocks = blocks.view(-1, inputs // self.kind.block * self.kind.nbytes).numpy()

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.from_numpy(libgguf.dequantize_rows(self.blocks, self.kind.id, self.inputs))
        return F.linear(x, weight.to(x.dtype))


def layers(kind: str, inputs: int, outputs: int, plain: nn.Linear) -> dict[str, nn.Module]:
    """The same weight three times: [outputs, inputs], no bias."""
    backend = backends.of_scheme(kind)
    packed = backend.encode(plain.weight.data, backends.parse(kind))
    blocks = packed.parts["blocks"]
    theirs = GGUFLinear(inputs, outputs, bias=False, compute_dtype=plain.weight.dtype)
    theirs.weight = GGUFParameter(blocks.view(outputs, -1), quant_type=gguf.GGMLQuantizationType[kind.upper()])
    return {
        "sdquant": quantized_layer(plain, packed),
        "diffusers": theirs,
        "libgguf": Libgguf(kind, blocks, inputs),
    }


def medians(turns: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, after one turn that warms up."""
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name in list(turns) if number % 2 else reversed(list(turns)):
            start = cpu_time(name)
            turns[name]()
            if number:
                times[name].append((cpu_time(name) - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def cpu_time(name: str) -> float:
    """libgguf starts threads of its own, whose time counts as well."""
    return time.process_time() if name.startswith("libgguf") else time.thread_time()


def turns_of(inputs: int, outputs: int, rows: int, most: int) -> int:
    work = inputs * outputs * rows
    return most if work < MIDDLING else max(5, most // 2) if work < MANY else 3


def machine() -> dict[str, object]:
    libraries = ("torch", "diffusers", "gguf", "libgguf")
    return {
        "platform": platform.platform(),
        "device": next(device.name for device in probe().devices if device.kind == "cpu"),
        "kernels": native.state(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in libraries},
    }


def measured(kinds: list[str], rows: list[int], dtype: torch.dtype, most: int) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for inputs, outputs in SHAPES:
        torch.manual_seed(0)
        plain = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
        made = {kind: layers(kind, inputs, outputs, plain) for kind in kinds}
        for count in rows:
            x = torch.randn(count, inputs, dtype=dtype)
            turns = {f"{name} {kind}": partial(one, x) for kind, peers in made.items() for name, one in peers.items()}
            turns["plain"] = partial(plain, x)
            with torch.no_grad():
                got = medians(turns, turns_of(inputs, outputs, count, most))
            for kind in kinds:
                ms = {name: got[f"{name} {kind}"] for name in made[kind]} | {"plain": got["plain"]}
                results.append({"type": kind, "inputs": inputs, "outputs": outputs, "rows": count, "ms": ms})
                ratios = "".join(f"{value / got['plain']:10.2f}" for name, value in ms.items() if name != "plain")
                print(f"{f'{inputs}->{outputs}':12}{kind:8}{count:6}{ratios}{got['plain']:12.2f}", flush=True)
    return results


def gates(results: list[dict[str, object]]) -> list[dict[str, object]]:
    """G6 for each type, shape and number of rows that it names."""
    found: list[dict[str, object]] = []
    for row in results:
        ms, count = row["ms"], row["rows"]
        assert isinstance(ms, dict)
        assert isinstance(count, int)
        if row["type"] not in GATED or count not in GATES:
            continue
        gate, aim = GATES[count]
        ratio = ms["sdquant"] / ms["plain"]
        verdict = "FAIL" if ratio > gate else "aim met" if ratio <= aim else "pass"
        print(f"G6 {row['type']:6}{row['inputs']}->{row['outputs']:<7}{count:5} rows {ratio:6.2f} of {gate}: {verdict}")
        where = {key: row[key] for key in ("type", "inputs", "outputs", "rows")}
        found.append({**where, "ratio": round(ratio, 3), "gate": gate, "aim": aim, "verdict": verdict})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each layer; fewer where one takes long")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(TYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="of activations")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"ms of CPU time as ratios to plain {args.dtype}, 1 thread, kernels: {native.state()}")
    print(f"{'layer':12}{'type':8}{'rows':>6}{'sdquant':>10}{'diffusers':>10}{'libgguf':>10}{'plain, ms':>12}")
    results = measured(args.kinds, args.rows, getattr(torch, args.dtype), args.rounds)
    verdicts = gates(results) if args.dtype == "bfloat16" else []
    if args.json:
        made = {"machine": machine(), "dtype": args.dtype, "rounds": args.rounds, "results": results, "G6": verdicts}
        args.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Time of decoding GGUF's block types: torch's own, libgguf's (ggml), the C kernels of each instruction set.

    OMP_NUM_THREADS=1 python -m bench.gguf_decode [--json FILE] [--rounds N] [--size N]

Milliseconds of CPU time of the process for [size, size] weights, medians, ways by turns, and their ratio to torch's.
Copying as many bfloat16 numbers is there to compare with. `sdquant/kernels/libgguf.py` has its table of types from
here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sdquant.backends._gguf_decode import DECODERS, decode_blocks
from sdquant.core.gguf_types import TYPES
from sdquant.core.packed_layout import PackedLayout
from sdquant.kernels.cpu import extension
from sdquant.kernels.cpu.cpu_kernels import Native
from sdquant.kernels.libgguf import Libgguf

from ._results import write

if TYPE_CHECKING:
    from collections.abc import Callable

ISAS = ("avx512bf16", "avx2", "portable")


def with_isa(name: str, form: PackedLayout, blocks: Tensor, out: Tensor) -> None:
    extension().choose(name)
    Native().decode_into(form, {"blocks": blocks}, out)


def ways(kind: str, size: int, out: Tensor) -> dict[str, Callable[[], None]]:
    """Codes are random and scales nothing: neither changes the time."""
    row = TYPES[kind]
    blocks = torch.randint(0, 64, (size * size // row.block, row.nbytes), dtype=torch.uint8)
    form = PackedLayout(rows=size, columns=size, codes="blocks", packing=kind, group=row.block)
    made: dict[str, Callable[[], None]] = {
        "torch": partial(decode_blocks, kind, blocks, out),
        "libgguf": partial(Libgguf().decode_into, form, {"blocks": blocks}, out),
    }
    if extension() is not None:
        made |= {name: partial(with_isa, name, form, blocks, out) for name in ISAS if extension().choose(name)}
    return made


def medians(turns: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            start = time.process_time()
            turn()
            if number:
                times[name].append((time.process_time() - start) * 1e3)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=3072)
    args = parser.parse_args()
    torch.set_num_threads(1)
    source, results = torch.zeros(args.size, args.size, dtype=torch.bfloat16), []
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(args.size, args.size, dtype=dtype)
        for kind in DECODERS:
            turns = ways(kind, args.size, out)
            turns["copy"] = partial(torch.empty_like(source).copy_, source)
            got = medians(turns, args.rounds)
            print(f"{str(dtype)[6:]:9}{kind:8}" + "".join(f"  {name} {ms:.2f}" for name, ms in got.items()), flush=True)
            case = f"{args.size}x{args.size} {str(dtype)[6:]}"
            results += [
                {"name": f"{kind} · {name}", "case": case, "ms": ms, "ratio": ms / got["torch"]}
                for name, ms in got.items()
            ]
    if args.json:
        write(args.json, "gguf_decode", results)


if __name__ == "__main__":
    main()

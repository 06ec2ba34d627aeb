"""Linear layers: every way to run each format, at the sizes of Flux, against plain bf16 in the same turns."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn

from bench import gpu_linear
from bench._cards import Clock, ways
from bench.linear_peers import SOME
from bench.repeated import repeated, repeats

SCHEMES = (
    "nf4", "int8_sym", "int8", "q8_0", "q4_k", "sdnq-uint4", "fp8,packing=float8", "qint4", "qint8", "bnb-int8",
    "int8_convrot", "w4a8", "svdq-int4", "comfy:nvfp4", "mxfp8",
)  # fmt: skip
ROWS = (1, 4, 16, 64, 256, 1024, 4608)
# What takes milliseconds a call, so that a phase has no time for it; `python -m bench.gpu_linear` measures it too.
WITHOUT = ("decoded by torch", "diffusers GGUF", "sdnq", "sdnq int8 matmul", "quanto")
HIDDEN = 3072
ROUNDS = 9
MOST_PROCESSES = 10


def measure(device: torch.device, small: bool) -> Iterator[dict[str, Any]]:
    """The rows of `bench.gpu_linear`. Before, each format in a process of its own compiles what it needs."""
    schemes, rows = (SCHEMES[:2], (1, 40)) if small else (SCHEMES, ROWS)
    shapes = [(128, 128)] if small else [(HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN)]
    if device.type == "cuda":
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1), mp_context=context) as pool:
            list(pool.map(_compile, schemes, [(device.type, shapes, rows)] * len(schemes)))
    clock = Clock(device)
    for scheme in schemes:
        for inputs, outputs in shapes:
            try:
                yield from _measured(scheme, inputs, outputs, rows, clock, 1 if small else ROUNDS)
            except Exception as error:  # a format that this machine lacks the library for
                text = f"{type(error).__name__}: {error}"[:300]
                yield {"name": scheme, "case": f"{inputs}x{outputs}", "error": text}


def _measured(scheme: str, inputs: int, outputs: int, rows: tuple[int, ...], clock: Clock, rounds: int) -> list[Any]:
    with torch.inference_mode(), repeated(SOME) if repeats(scheme) else nullcontext():
        return gpu_linear.measured(scheme, inputs, outputs, rows, clock, rounds, WITHOUT)


def _compile(scheme: str, how: tuple[str, list[tuple[int, int]], tuple[int, ...]]) -> None:
    """Call each way to run the format once for each number of rows, so that Triton's cache has its kernels."""
    kind, shapes, rows = how
    for inputs, outputs in shapes:
        floats = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16, device=kind).requires_grad_(False)
        with torch.inference_mode(), repeated(SOME) if repeats(scheme) else nullcontext():
            for name, run in ways(floats, scheme).items():
                for count in rows if name not in WITHOUT else ():
                    with suppress(Exception):  # the phase itself says so in a row
                        run(torch.randn(count, inputs, device=kind).to(torch.bfloat16))

"""A step of Flux with 12 billion random weights, at 1024 x 1024: every format against bf16, with the host's time."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bench import gpu_flux
from bench._cards import PLAIN, Clock
from bench.linear_peers import SOME, library_layer, packed
from bench.repeated import repeated
from sdquant.core.backend import Packed
from sdquant.nn import quantized_layer

# Name -> format, `compute`, and whether it is the library's own module.
VARIANTS: dict[str, tuple[str, str | None, bool]] = {
    PLAIN: ("", None, False),
    "nf4": ("nf4", None, False),
    "nf4 · bitsandbytes": ("nf4", None, True),
    "nf4 compute=int8": ("nf4", "int8", False),
    "int8_sym": ("int8_sym", None, False),
    "int8_sym compute=int8": ("int8_sym", "int8", False),
    "fp8,packing=float8 compute=fp8": ("fp8,packing=float8", "fp8", False),
    "q8_0": ("q8_0", None, False),
    "q4_k": ("q4_k", None, False),
    "sdnq-uint4": ("sdnq-uint4", None, False),
    "int8_convrot": ("int8_convrot", None, False),
    "int8_convrot compute=int8": ("int8_convrot", "int8", False),
    "w4a8 compute=int8": ("w4a8", "int8", False),
    "svdq-int4": ("svdq-int4", None, False),
    "svdq-int4 compute=int8": ("svdq-int4", "int8", False),
    "comfy:nvfp4": ("comfy:nvfp4", None, False),
    "mxfp8 compute=fp8": ("mxfp8", "fp8", False),
    "bnb-int8": ("bnb-int8", None, False),
    "bnb-int8 · bitsandbytes": ("bnb-int8", None, True),
    "qint8": ("qint8", None, False),
    "qint8 · quanto": ("qint8", None, True),
    "qint4": ("qint4", None, False),
    "qint4 · quanto": ("qint4", None, True),
    f"{PLAIN} again": ("", None, False),
}


def arguments(small: bool) -> argparse.Namespace:
    """The model's sizes: FLUX.1's, or a small one's."""
    return argparse.Namespace(
        size=gpu_flux.HEAD if small else gpu_flux.WIDTH, double=1 if small else gpu_flux.DOUBLE,
        single=1 if small else gpu_flux.SINGLE, image=16 if small else gpu_flux.IMAGE,
        text=8 if small else gpu_flux.TEXT, rounds=1 if small else 3, compile=False,
    )  # fmt: skip


def replacement(scheme: str, compute: str | None, library: bool) -> Callable[[nn.Linear], nn.Module]:
    """What puts a quantized layer in a linear one's place. One weight of each shape is encoded; each layer has a copy
    of it in memory of its own, so that as many bytes are read as in a real model."""
    encoded: dict[tuple[int, ...], Packed] = {}

    def replace(layer: nn.Linear) -> nn.Module:
        shape = tuple(layer.weight.shape)
        if library:
            made: Any = library_layer(layer, scheme)
            return made.to(layer.weight.device)
        if shape not in encoded:
            with repeated(SOME):
                encoded[shape] = packed(layer, scheme)
        one = encoded[shape]
        own = Packed(spec=one.spec, parts={name: part.clone() for name, part in one.parts.items()})
        made = quantized_layer(layer, own, compute=compute)
        made.lay_out(str(layer.weight.device))
        return made

    return replace


def measure(device: torch.device, small: bool) -> Iterator[dict[str, Any]]:
    """A row for each variant, its `ratio` to bf16 in the same run. Only the library's own layers have a `distance`:
    the others' weights are one block over and over."""
    args, clock = arguments(small), Clock(device)
    wanted, base = None, 0.0
    for name, (scheme, compute, library) in VARIANTS.items():
        row: dict[str, Any] = {"name": name, "case": "Flux small" if small else "Flux 12B 1024px", "ratio": None}
        begin = time.perf_counter()
        try:
            replace = replacement(scheme, compute, library) if scheme else None
            with torch.inference_mode():
                found = gpu_flux.measured(replace, args, clock)
            out = found.pop("out")
            if wanted is None:
                wanted, base = out, found["seconds"]
            row |= found | {"ratio": found["seconds"] / base, "whole": time.perf_counter() - begin}
            if library or not scheme:
                row["distance"] = ((out - wanted).norm() / wanted.norm()).item()
        except Exception as error:  # a format that this machine lacks the library for, or a card that is too small
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        gc.collect()
        if clock.card:
            torch.cuda.empty_cache()
        yield row

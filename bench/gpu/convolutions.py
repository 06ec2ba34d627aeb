"""Convolutions at the sizes of SDXL's UNet, and linear layers with rules, against plain bf16 in the same turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bench._cards import OURS, PLAIN, Clock
from bench.linear_peers import packed
from sdquant.nn import quantized_layer
from sdquant.rules import PtqProvider, QuantizationRule

# Channels in and out, and the side of the latent image at 1024 x 1024.
SHAPES = ((320, 320, 128), (640, 640, 64), (1280, 1280, 32), (2560, 1280, 32))
SCHEMES = ("int8_sym", "nf4", "sdnq-uint4", "q8_0", "int8")
RULES: dict[str, dict[str, Any]] = {
    "w8a8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "w4a8": {"weight_qtype": "int4", "act_qtype": "int8"},
    "w8a8 tile_size=128": {"weight_qtype": "int8", "act_qtype": "int8", "tile_size": 128},
    "fp8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
}
ROWS, HIDDEN, ROUNDS = (1, 256, 4608), 3072, 9


def measure(device: torch.device, small: bool) -> Iterator[dict[str, Any]]:
    """A row for each convolution and way to run it, then one for each rule and number of rows."""
    clock, rounds = Clock(device), 1 if small else ROUNDS
    for inputs, outputs, side in [(64, 64, 8)] if small else SHAPES:
        floats = nn.Conv2d(inputs, outputs, 3, padding=1).to(device, torch.bfloat16).requires_grad_(False)
        x = torch.randn(1, inputs, side, side, device=device).bfloat16()
        runs: dict[str, Callable[[], Tensor]] = {PLAIN: _called(floats, x)}
        for scheme in SCHEMES:
            for compute in (None, "int8"):
                layer: Any = quantized_layer(floats, packed(floats, scheme), compute=compute)  # type: ignore[arg-type]
                layer.lay_out(str(device))
                runs[f"{OURS} {scheme}" + (f" compute={compute}" if compute else "")] = _called(layer, x)
        yield from _measured(clock, runs, f"conv {inputs}x{outputs} side {side}", rounds)
    hidden = 128 if small else HIDDEN
    linear = nn.Linear(hidden, hidden).to(device, torch.bfloat16).requires_grad_(False)
    layers = {name: PtqProvider([]).layer(linear, QuantizationRule(**rule), "a") for name, rule in RULES.items()}
    for rows in (40,) if small else ROWS:
        x = torch.randn(rows, hidden, device=device).bfloat16()
        runs = {PLAIN: _called(linear, x)} | {f"rule {name}": _called(layer, x) for name, layer in layers.items()}
        yield from _measured(clock, runs, f"{hidden}x{hidden} bf16 M={rows}", rounds)


def _called(layer: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        y: Tensor = layer(x)
        return y

    return call


def _measured(clock: Clock, runs: dict[str, Callable[[], Tensor]], case: str, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each run: seconds, ratio to the plain one, distance of its result from the plain one's."""
    with torch.inference_mode():
        wanted, rows = runs[PLAIN]().float(), {}
        for name, run in list(runs.items()):
            row: dict[str, Any] = {"name": name, "case": case, "ratio": None}
            try:
                row["distance"] = ((run().float() - wanted).norm() / wanted.norm()).item()
            except Exception as error:  # what a card does not run is a row that says so
                row["error"] = f"{type(error).__name__}: {error}"[:300]
                del runs[name]
            rows[name] = row
        seconds = clock.medians(runs, rounds)
        for name, row in rows.items():
            if name in seconds:
                row |= {"seconds": seconds[name], "ratio": seconds[name] / seconds[PLAIN]}
                row["call_us"] = clock.call(runs[name]) * 1e6
            yield row

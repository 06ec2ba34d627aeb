"""Time on a card, and the ways to run a layer there.

With a CPU as the device the same is gone through with a clock, to see that it runs at all: such numbers mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.linear_peers import Run, diffusers_gguf, library_layer, packed, sdnq_layer, sdnq_matmul, torchao_layer
from sdquant import backends
from sdquant.kernels.row_codes import RowCodes
from sdquant.kernels.triton import imports
from sdquant.kernels.triton.triton_kernels import TritonReader
from sdquant.kernels.workspace import scratch
from sdquant.nn import quantized_layer

if TYPE_CHECKING:
    from sdquant.core.backend import Backend, Packed

NO_DEVICE = "no CUDA device"
FLUSHED = 256 << 20  # bytes written between two calls: more than any card's cache, so that weights come from memory
PLAIN, OURS, FUSED, APART = "plain bf16", "sdquant", "multiplied by Triton", "fields apart"


def present(device: str) -> bool:
    """Whether the device is there; says so if not."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        print(NO_DEVICE)
        return False
    return True


class Clock:
    """Seconds of calls on a device, each with cold caches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.card = device.type == "cuda"
        self.waste = torch.empty(FLUSHED if self.card else 1, dtype=torch.uint8, device=device)

    def once(self, runs: Mapping[str, Callable[[], Any]], backwards: bool) -> dict[str, float]:
        """Each run once, in one order or the other. On a card the launches of all are queued before anything waits, so
        that the time of launching shows only where it is longer than the work before it."""
        marks: dict[str, tuple[Any, Any]] = {}
        for name in list(runs)[:: -1 if backwards else 1]:
            self.waste.zero_()
            if self.card:
                marks[name] = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                marks[name][0].record()
                runs[name]()
                marks[name][1].record()
            else:
                begin = time.perf_counter()
                runs[name]()
                marks[name] = begin, time.perf_counter()
        if self.card:
            torch.cuda.synchronize(self.device)
            return {name: begin.elapsed_time(end) / 1e3 for name, (begin, end) in marks.items()}
        return {name: end - begin for name, (begin, end) in marks.items()}

    def medians(self, runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
        """Median seconds of each, taken in turns."""
        self.once(runs, False)
        self.once(runs, True)
        found = [self.once(runs, number % 2 == 1) for number in range(rounds)]
        return {name: statistics.median(one[name] for one in found) for name in runs}

    def call(self, run: Callable[[], Any]) -> float:
        """Seconds of the processor for one call, with nothing to wait for: few calls, so that no queue fills."""
        calls = 50 if self.card else 1
        run()
        if self.card:
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        taken = time.perf_counter() - begin
        if self.card:
            torch.cuda.synchronize(self.device)
        return taken / calls


def peers(scheme: str) -> dict[str, Callable[[nn.Linear], Run | None]]:
    """What else runs the format on a card, by name."""
    backend = backends.parse(scheme).scheme.backend
    if backend == "bnb" and not scheme.startswith("fp8"):
        return {"bitsandbytes": lambda floats: library_layer(floats, scheme)}
    if backend == "quanto" and scheme != "qint3":
        return {"quanto": lambda floats: library_layer(floats, scheme)}
    if backend == "gguf":
        return {"diffusers GGUF": lambda floats: _with_bias(diffusers_gguf(floats, scheme), floats)}
    if backend == "sdnq":
        return {"sdnq": lambda floats: sdnq_layer(floats, scheme)}
    if scheme == "int8_sym":
        return {
            "torchao weight-only": lambda floats: torchao_layer(floats, False),
            "torchao dynamic": lambda floats: torchao_layer(floats, True),
            "sdnq int8 matmul": lambda floats: sdnq_matmul(floats, "sdnq-int8"),
        }
    return {}


def _with_bias(run: Any, floats: nn.Linear) -> Run | None:
    """A peer's module that was made without a bias, with the layer's; None where there is none."""
    if run is not None:
        run.bias = floats.bias
    module: Run | None = run
    return module


def ways(floats: nn.Linear, scheme: str) -> dict[str, Run]:
    """sdquant's ways to run one weight: its own choice, as in a model that was loaded for the device, and each of those
    it chooses between; GGUF's blocks also with their fields apart."""
    held = packed(floats, scheme)
    backend = backends.get(backends.parse(scheme).scheme.backend)
    made: dict[str, Run] = {PLAIN: floats, OURS: quantized_layer(floats, held)}
    made[f"{OURS} compute=int8"] = quantized_layer(floats, held, compute="int8")
    for layer in (made[OURS], made[f"{OURS} compute=int8"]):
        layer.lay_out(str(held.device))  # type: ignore[attr-defined]
    made["decoded by torch"] = lambda x: F.linear(x, backend.decode(held, x.dtype))
    made |= _by_triton(backend, held, floats.weight.dtype)
    other = backend.for_kernels(held)
    if other is not held:
        made |= {f"{name}, {APART}": run for name, run in _by_triton(backend, other, floats.weight.dtype).items()}
    return made


def _by_triton(backend: Backend, held: Packed, dtype: torch.dtype) -> dict[str, Run]:
    """What its kernels do with a weight as it lies."""
    form, launcher, reader = backend.form(held), imports.launcher(), TritonReader()
    if form is None or launcher is None or not reader.reads(form, held.parts, dtype):
        return {}

    def decoded(x: Tensor) -> Tensor:
        weight = scratch((form.rows, form.columns), x.dtype, x.device)
        reader.decode_into(form, held.parts, weight)
        return F.linear(x, weight)

    made: dict[str, Run] = {"decoded by Triton": decoded}
    if not launcher.multiplies(form):
        return made

    def fused(x: Tensor) -> Tensor:
        out = torch.empty(len(x), form.rows, dtype=x.dtype, device=x.device)
        reader.product(form, held.parts, x, None, out)
        return out

    made[FUSED] = fused
    made["int8 by Triton"] = lambda x: _int8(x, form, held.parts)
    if form.packing == "float8_e4m3fn" and form.group == form.columns:
        made["float8 by Triton"] = lambda x: _float8(x, held.parts[form.codes], held.parts[form.scale])
    return made


def _int8(x: Tensor, form: Any, parts: Mapping[str, Tensor]) -> Tensor:
    """Both sides as int8 codes; the weight's own where it has them, else made again at each call."""
    eight = imports.eight(x.device)
    if eight is None:
        raise NotImplementedError("the kernels for 8-bit products do not run here")
    if form.packing == "int8" and form.group == form.columns and not (form.zero or form.shift):
        weight = RowCodes(parts[form.codes].view(form.rows, form.columns), parts[form.scale], form.factor)
    else:
        weight = RowCodes(*eight.quantize_weight(form, parts, torch.int8))
    rows, row_scale, _ = eight.quantize_rows(x, sums=False)
    found = torch.empty(len(x), form.rows, dtype=x.dtype, device=x.device)
    eight.product(rows, row_scale, weight, None, found, None)(x.device)
    return found


def _float8(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    eight = imports.eight(x.device)
    if eight is None:
        raise NotImplementedError("the kernels for 8-bit products do not run here")
    rows, row_scale, _ = eight.quantize_rows(x, torch.float8_e4m3fn)
    found: Tensor = torch._scaled_mm(rows, codes.t(), row_scale, scale.view(1, -1).float(), out_dtype=x.dtype)
    return found

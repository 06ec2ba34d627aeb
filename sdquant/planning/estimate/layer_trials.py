"""Time layers on this machine's processor: some tens of milliseconds for each scheme.

A model's weights do not fit into the caches, so several copies of a layer take turns, and with them the unquantized
layers, so that whatever slows the machine down slows both. A ratio is the median of such turns; other programs count
little, since what one thread takes is its own time.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from time import get_clock_info, perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from ...core import Unfit, dtype_named, packed_rows, registry
from ...kernels import fastest
from ...nn import quantized_layer

if TYPE_CHECKING:
    from ...core import Packed, QuantSpec

BASE = "int8_sym"  # it is encoded at once, and needs no library
_ENCODED = 16  # rows of the weight, which are repeated
_CACHE = 40 << 20  # bytes that the copies of a layer should have at least: what other programs leave of a cache
_LEAST, _MOST, _ENOUGH = 3, 16, 0.02  # turns, and seconds for them
# Seconds of a call: with so many rows that it should take longer, it is taken to grow with them. Without instructions
# for a dtype, as of 16 bits on AVX2, a convolution takes seconds.
_LONGEST = 0.5
_NUMBERS = 1 << 20  # that other operations are timed with
# GGUF types whose encoder takes seconds, and one that is decoded much as they are.
_ALIKE = dict.fromkeys(("iq1_m", "iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_s"), "iq3_xxs")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A layer that is timed, "linear" or "conv", and numbers of activation rows, ascending; those of a convolution are
    the pixels of a square image."""

    kind: str
    inputs: int
    outputs: int
    rows: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """How many numbers the weight has."""
        return self.inputs * self.outputs * (9 if self.kind == "conv" else 1)


SIZES = {
    "linear": Size(kind="linear", inputs=1536, outputs=1536, rows=(1, 64, 256, 1024)),
    "conv": Size(kind="conv", inputs=1280, outputs=640, rows=(16, 64, 256, 1024)),
}
# torch orders the weight of a convolution anew at each call, which takes much longer if it fits into no cache.
WIDE = Size(kind="conv", inputs=2560, outputs=1280, rows=(16,))
DIFFERENCE = {  # by what schemes are told apart
    "linear": Size(kind="linear", inputs=1536, outputs=1536, rows=(1, 64)),
    "conv": Size(kind="conv", inputs=512, outputs=512, rows=(64,)),
}
_CALL = {  # whose computing is next to nothing
    "linear": Size(kind="linear", inputs=256, outputs=_ENCODED, rows=(1,)),
    "conv": Size(kind="conv", inputs=256, outputs=_ENCODED, rows=(16,)),
}


def both(size: Size, dtype: str, scheme: str, compute: str | None, than: str | None = None) -> list[list[float]]:
    """Return what an unquantized layer takes, or one of the scheme `than`, and what a scheme's takes relative to it: of
    a call the seconds, and with each number of rows those for each number of the weight."""
    small = _CALL[size.kind]
    seconds: list[float] = []
    ratios: list[float] = []
    for which in (small, size):
        layers = _layers(which, dtype)
        plain = layers if than is None else _quantized(layers, than, compute)
        try:
            ours = _quantized(layers, scheme, compute)
        except Unfit:  # such a small layer gets no branch
            if which is not small:
                raise
            ours = plain
        before = math.inf
        for rows in which.rows:
            more, before = rows / before, rows
            if more and seconds[-1] * more > _LONGEST:
                seconds.append(seconds[-1] * more)
                ratios.append(ratios[-1])
                continue
            x = _activations(which, dtype, rows)
            if rows == which.rows[0]:
                _prepare((*plain, *ours), x)
            if compute is not None or has_own_products(scheme):
                _prepare([ours[0]] * (2 * fastest.CALLS), x)  # then it is decided who multiplies
            times = _turns([plain, ours], x)
            seconds.append(_low(times[0]))
            ratios.append(statistics.median(b / a for a, b in zip(*times, strict=True)))
    call, *rest = seconds
    return [[call, *(max(one - call, one / 10) / size.numbers for one in rest)], ratios]


@cache
def has_own_products(scheme: str) -> bool:
    """Return whether a scheme's products are its own, as those of rules for activations."""
    try:
        spec = registry.parse(_ALIKE.get(scheme, scheme))
        packed = spec.scheme.codec.encode(_layers(_CALL["linear"], "bfloat16")[0].weight.data, spec)
        return spec.scheme.codec.computes(packed.spec) or spec.scheme.codec.activations(packed) is not None
    except Exception:  # whatever it is, as of a library that is not there: what is timed meets it again
        return False


def others() -> list[float]:
    """Return the seconds of an activation function of a few numbers, and of each byte of one of many, as a mean of some
    that networks have."""
    small, large = (torch.ones(rows, rows, dtype=torch.bfloat16, device="cpu") for rows in (16, math.isqrt(_NUMBERS)))
    functions: tuple[Any, ...] = (F.silu, lambda x: x * 2, lambda x: x + x, lambda x: F.layer_norm(x, x.shape[-1:]))
    few, many = ([_low(_turns([[one]], x)[0]) for one in functions] for x in (small, large))
    call = sum(few) / len(few)
    return [call, max(sum(many) / len(many) - call, 0.0) / (_NUMBERS * large.itemsize)]


def _low(seconds: Sequence[float]) -> float:
    """Return the lower quartile."""
    return sorted(seconds)[len(seconds) // 4]


def _prepare(layers: Iterable[Callable[[torch.Tensor], object]], x: torch.Tensor) -> None:
    """Let layers do what they do at their first calls alone."""
    for layer in layers:
        layer(x)


def _turns(all_layers: Sequence[Sequence[Callable[[torch.Tensor], object]]], x: torch.Tensor) -> list[list[float]]:
    """Return what calls take, the layers of each sequence by turns."""
    # On Windows it is said to count 100 ns, and counts ticks of 16 ms.
    is_fine = sys.platform != "win32" and get_clock_info("thread_time").resolution < 1e-6
    clock = thread_time if is_fine else perf_counter
    _prepare((layers[-1] for layers in all_layers), x)
    times_of_all: list[list[float]] = [[] for _ in all_layers]
    begin, turn = clock(), 0
    while turn < _LEAST or (turn < _MOST and clock() - begin < _ENOUGH):
        for layers, times in zip(all_layers, times_of_all, strict=True):
            layer = layers[turn % len(layers)]
            start = clock()
            layer(x)
            times.append(clock() - start)
        turn += 1
    return times_of_all


def _layers(size: Size, dtype: str) -> list[Any]:
    """Return layers with the same weights, each in memory of its own, together larger than the cache."""
    inputs, outputs, kind = size.inputs, size.outputs, dtype_named(dtype)
    layers: list[Any] = []
    for _ in range(1 if outputs == _ENCODED else max(2, -(-_CACHE // (size.numbers * kind.itemsize)))):
        one: Any = (
            nn.Conv2d(inputs, outputs, 3, padding=1, device="meta")
            if size.kind == "conv"
            else nn.Linear(inputs, outputs, device="meta")
        )
        shape = one.weight.shape[1:]
        count = torch.arange(shape.numel() * _ENCODED, dtype=torch.float32, device="cpu")
        rows = (count * count).sin().mul(0.02).to(kind).view(_ENCODED, *shape)  # no number is drawn
        one.weight = nn.Parameter(rows.repeat(outputs // _ENCODED, *[1] * len(shape)), requires_grad=False)
        one.bias = nn.Parameter(rows.new_zeros(outputs), requires_grad=False)
        layers.append(one.eval())
    return layers


def _activations(size: Size, dtype: str, rows: int) -> torch.Tensor:
    side = math.isqrt(rows)
    shape = (1, size.inputs, side, side) if size.kind == "conv" else (rows, size.inputs)
    values = torch.linspace(-2, 2, math.prod(shape), dtype=torch.float32, device="cpu").sin()
    return values.view(shape).to(dtype_named(dtype))


def _quantized(layers: Sequence[Any], scheme: str, compute: str | None) -> list[nn.Module]:
    packed = _packed(layers[0], registry.parse(_ALIKE.get(scheme, scheme)))
    parts = [{name: part.clone() for name, part in packed.parts.items()} for _ in layers]
    return [
        quantized_layer(one, replace(packed, parts=own), compute=compute).eval()
        for one, own in zip(layers, parts, strict=True)
    ]


def _packed(layer: Any, spec: QuantSpec) -> Packed:
    """Return the weight quantized; some of its rows, which are repeated, if the packing allows it."""
    codec, weight = spec.scheme.codec, layer.weight.data
    try:
        part = codec.encode(weight[:_ENCODED], spec)
    except Unfit:  # as with a low-rank branch
        return codec.encode(weight, spec)
    if not codec.by_row(part):
        return codec.encode(weight, spec)
    return packed_rows.take(part, torch.arange(len(weight), device=part.device) % _ENCODED)

"""The processor's time for a call of a quantized layer on a card, without one: under a driver that launches nothing.

    python -m bench.host_time

Kernels are compiled for sm_90, and tensors of the CPU count as those of a card. What torch computes beside them is left
out, and so is the driver's own launch. Seconds are one thread's own, and the kinds take turns: the median of many.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any
from unittest import mock

import torch
from torch import nn
from triton.runtime import driver

from bench._no_card import NoCard
from sdquant import backends
from sdquant.kernels import linear_with_branch, preparation
from sdquant.kernels.base import Coding, EightBit
from sdquant.kernels.int8_reference import AGAIN_RUN, coding, needs_sums
from sdquant.kernels.triton import bound_branch, bound_eight, bound_expansion, bound_floats, bound_linear, bound_scheme
from sdquant.nn import quantized_layer
from sdquant.nn.quantized_layers import PREFIX

INPUTS, OUTPUTS, FEW, MANY, LEAST = 512, 64, 16, 100, 32
CALLS, TURNS = 50, 41
BF16 = torch.bfloat16


class _Launcher:
    """In place of the launcher that Triton builds in C."""

    def __init__(self, src: Any, metadata: Any) -> None: ...

    def __call__(self, *given: Any) -> None: ...


@contextmanager
def card() -> Iterator[None]:
    """Let tensors of the CPU count as those of device -1, which is the current one; torch's products do nothing."""
    made: dict[tuple[int, int], torch.Tensor] = {}

    def product(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        key = (x.numel(), len(weight))
        found = made.get(key)
        if found is None:
            found = made[key] = torch.zeros(*x.shape[:-1], len(weight), dtype=x.dtype)
        return found

    with (
        mock.patch.object(driver, "_active", NoCard(_Launcher, 90)),
        mock.patch.object(bound_linear, "current_index", lambda x: -1),
        mock.patch.object(bound_linear, "prefers_other", lambda *of: False),
        mock.patch.object(bound_linear, "verdict_of", lambda *of: False),
        mock.patch.object(bound_linear.F, "linear", product),
        mock.patch.object(bound_branch, "prefers_other", lambda kind, *of: kind[0] == "whole"),
        torch.inference_mode(),
    ):
        yield


def layer_of(scheme: str, bound: Callable[[Any], Any], module: nn.Module | None = None) -> Any:
    """A layer with a scheme, whose calls go to what `bound` makes of it."""
    floats = (module or nn.Linear(INPUTS, OUTPUTS)).to(BF16).requires_grad_(False)
    spec = backends.parse(scheme)
    layer: Any = quantized_layer(floats, spec.scheme.codec.encode(floats.weight.data, spec)).eval()
    layer._prepared, layer._prepared_for = bound(layer), (BF16, torch.device("cpu"))
    return layer


def linear(layer: Any, eight: EightBit | None = None) -> Any:
    """What `TritonReader.prepared` makes."""
    form = layer._backend.form(layer.packed.without_rotation)
    return bound_eight.bind(form, layer.packed.parts, BF16, FEW, PREFIX, eight, layer.packed.spec.rotation)


def integers(layer: Any) -> Any:
    """The same in 8-bit integers."""
    form = layer._backend.form(layer.packed.without_rotation)
    of = coding(layer.packed, form)
    return linear(layer, EightBit(LEAST, of, sums=needs_sums(form), run=AGAIN_RUN))


def floats8(how: Coding) -> Callable[[Any], Any]:
    """The same in 8-bit floats, without torch's product."""
    out = torch.zeros(MANY, OUTPUTS, dtype=BF16)
    return lambda layer: linear(layer, EightBit(LEAST, how, floats=lambda *of: out, at_once=how is Coding.AGAIN))


def rule(layer: Any) -> Any:
    """What a rule for activations becomes."""
    return bound_scheme.BoundScheme(layer._form, layer.packed.parts, BF16, layer._activations, PREFIX)


def floats(layer: Any) -> Any:
    """What a rule becomes whose products are of floats."""
    how = layer._backend.float_rounding(layer.packed, BF16)
    return bound_floats.BoundFloats(layer._form, layer.packed.parts, BF16, how, PREFIX, FEW, FEW)


def codes_of_integers(compute: str | None) -> Callable[[Any], Any]:
    """A weight whose codes stand for 8-bit integers: those, or the values of them for many rows of x, in one launch."""

    def bound(layer: Any) -> Any:
        packed, eight = layer.packed, None
        expand = layer._backend.integers(packed)
        weight = expand()
        form = weight.spec.scheme.codec.form(weight.without_rotation)
        if compute is not None:
            eight = EightBit(LEAST, Coding.BY_ROW)
        inner = bound_eight.bind(form, weight.parts, BF16, FEW, PREFIX, eight, packed.spec.rotation)
        few, rotation = None if compute is not None else LEAST, packed.spec.rotation
        of = expand.sources(), packed.parts, packed.spec.shape
        return bound_expansion.BoundExpansion(*of, BF16, PREFIX, rotation, few, inner)

    return bound


def convolution(layer: Any) -> Any:
    """A convolution without torch's own."""
    out = torch.zeros(1)
    form, parts = layer._form, layer.packed.parts
    return bound_linear.BoundConvolution(form, parts, BF16, PREFIX, layer.spec.shape, lambda *of: out)


def branch(layer: Any) -> Any:
    """A weight with a low-rank branch: decoded with it for many rows, between its sides for few."""
    of, packed = layer._backend.low_rank(layer.packed), layer.packed
    parts = of.residual_of(packed.parts)
    form = layer._backend.form(packed.__class__(spec=packed.spec, parts=parts))
    whole = bound_branch.bind_with_branch(form, parts, of, packed.parts, BF16, FEW, FEW, PREFIX, None, 0)
    return linear_with_branch.LinearWithBranch(
        packed.spec, of, PREFIX, BF16, None, preparation.partial(preparation.dispatch.multiply, None, form, None), whole
    )


def kinds() -> Iterator[tuple[str, Any, torch.Tensor]]:
    """What it is, a layer, and activations."""
    one, many = (torch.ones(1, rows, INPUTS, dtype=BF16) for rows in (1, MANY))
    image = torch.ones(1, 64, 8, 8, dtype=BF16)
    yield "torch's own nn.Linear, without its product", nn.Linear(INPUTS, OUTPUTS).to(BF16).requires_grad_(False), one
    for scheme in ("nf4", "int8_sym", "q4_k", "sdnq-uint4"):
        yield f"{scheme}, one row", layer_of(scheme, linear), one
        yield f"{scheme}, many rows: decode", layer_of(scheme, linear), many
    yield "int8_convrot, one row: rotate, multiply", layer_of("int8_convrot", linear), one
    yield "int8_sym in int8: quantize, multiply", layer_of("int8_sym", integers), many
    yield "int8 in int8: quantize, multiply", layer_of("int8", integers), many
    yield "nf4 in int8: quantize, again, multiply", layer_of("nf4", integers), many
    yield "fp8 in fp8: quantize", layer_of("fp8,packing=float8", floats8(Coding.BY_ROW)), many
    yield "nf4 in fp8: quantize, again", layer_of("nf4", floats8(Coding.AGAIN)), many
    yield "w4a8, one row: expand, rotate, multiply", layer_of("w4a8", codes_of_integers(None)), one
    yield "w4a8, many rows: expand, rotate", layer_of("w4a8", codes_of_integers(None)), many
    yield "w4a8 in int8: expand, quantize, multiply", layer_of("w4a8", codes_of_integers("int8")), many
    yield "rule w8a8: quantize, multiply", layer_of("rules,act_qtype=int8", rule), many
    yield "rule w4a8: unpack, quantize, multiply", layer_of("rules,weight_qtype=int4,act_qtype=int8", rule), many
    of_floats = "rules,weight_qtype=float8_e4m3fn,act_qtype=float8_e4m3fn"
    yield "rule in float8: round, decode, scale", layer_of(of_floats, floats), many
    yield "nf4 convolution: decode", layer_of("nf4", convolution, nn.Conv2d(64, 32, 3, padding=1)), image
    yield "svdq-int4, one row: down, multiply, up", layer_of("svdq-int4", branch, nn.Linear(INPUTS, 128)), one
    yield "svdq-int4, many rows: decode with its branch", layer_of("svdq-int4", branch, nn.Linear(INPUTS, 128)), many


def times(of_turns: Callable[[list[float]], float] = statistics.median) -> dict[str, float]:
    """Return the seconds of a call, by kind, from those of all turns."""
    with card():
        made = [*kinds()]
        for _, layer, x in made:
            for _ in range(5):
                layer(x)
        found: dict[str, list[float]] = {name: [] for name, _, _ in made}
        for _ in range(TURNS):
            for name, layer, x in made:
                start = thread_time()
                for _ in range(CALLS):
                    layer(x)
                found[name].append((thread_time() - start) / CALLS)
    return {name: of_turns(some) for name, some in found.items()}


def main() -> None:
    """Print."""
    torch.set_num_threads(1)
    for name, seconds in times().items():
        print(f"{name:48} {seconds * 1e6:6.1f} us")


if __name__ == "__main__":
    main()

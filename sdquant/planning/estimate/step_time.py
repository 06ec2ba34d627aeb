"""Predict the step time relative to the unquantized model, from the times of layers on this machine.

    step(plan, meta_models.trace_plan(plan), hardware.probe())      0.74: a step takes about three quarters of the time

Each product with a weight takes the time of a layer with that many rows (`layer_timings`); products of two activations
and all other operations take the same time for every scheme. The prediction is without offloading, and ignores
components that run once per image (text encoders and VAEs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...core import dtype_name, gguf_types
from ...kernels import cpu_state, verdicts
from ...models import model_name
from ..component_types import role_of
from . import layer_timings

if TYPE_CHECKING:
    from ...compat import Machine
    from ...models import Product, Trace, Work
    from ..plan import ComponentPlan, Plan

# Times that differ by less count as equal: predicted ratios are off by 7 % (root mean square, `python -m
# bench.foreseen`), some by twice as much.
NEAR = 0.10

FLOATS = frozenset(name for name, row in gguf_types.TYPES.items() if row.dtype)  # unquantized GGUF types


def step(plan: Plan, traced: Mapping[str, Trace | None], machine: Machine) -> float | None:
    """Return the computing time of a step relative to the same model unquantized, both on the plan's device.

    Args:
        plan: only components that run in every step count: UNets, transformers.
        traced: result of `meta_models.trace_plan` for it, or for the same model with other schemes.

    Returns:
        None if it is unknown: on another machine than this one or a graphics card, with another runtime or a scheme
        that cannot be encoded, or if shapes cannot be traced or nothing may be measured (SDQUANT_TUNE=0).
    """
    parts = [part for part in plan.components if (row := role_of(part.name)) is not None and row.name == "model"]
    if plan.device.partition(":")[0] != "cpu" or not knows(machine) or not parts:
        return None
    other = layer_timings.others()
    ours = floats = 0.0
    for part in parts:
        trace = traced.get(part.name)
        seconds = None if trace is None or other is None else products(part, trace.work)
        if trace is None or other is None or seconds is None:
            return None
        rest = trace.work.others * other[0] + trace.work.made * other[1]
        ours, floats = ours + seconds[0] + rest, floats + seconds[1] + rest
    return ours / floats if floats else None


def counted(time: float, fastest: float) -> float:
    """Return a predicted time as it counts in a choice: times close to the fastest are equal."""
    return max(time, (1 + NEAR) * fastest)


def knows(machine: Machine) -> bool:
    """Return whether it can be asked how fast a machine computes: it is this one, and may be measured."""
    return machine.native == cpu_state() and verdicts.tunes()


def said(ratio: float) -> str:
    """Describe a time ratio."""
    return f"computing a step takes about {max(ratio, 0.01):.2g} of the unquantized model's time, by layers timed here"


def products(part: ComponentPlan, work: Work) -> tuple[float, float] | None:
    """Return the seconds of all products as planned, and with unquantized weights; None if unknown."""
    if part.weights and (part.runtime != "plain" or part.compute not in (None, "int8")):
        return None
    names = frozenset(product.weight for product in work.products if product.weight is not None)
    schemes = {model_name(weight.name, names) or weight.name: weight.scheme for weight in part.weights}
    ours = floats = 0.0
    for product, times in work.products.items():
        pair = _pair(part, schemes.get(product.weight or ""), product)
        if pair is None:
            return None
        floats += times * pair.plain.seconds(product.numbers, product.rows)
        ours += times * pair.ours.seconds(product.numbers, product.rows)
    return ours, floats


def _pair(part: ComponentPlan, scheme: str | None, product: Product) -> layer_timings.Pair | None:
    """Return the times of such a layer; those of a linear layer if the scheme has no convolutions of this kind."""
    dtype = dtype_name(product.dtype)
    if scheme is None or scheme in FLOATS:
        return layer_timings.pair(product.kind, dtype, None, None)
    text = scheme if part.spec is None or part.spec.scheme.name != scheme else str(part.spec)
    kinds = dict.fromkeys((product.kind, "linear"))
    pairs = (layer_timings.pair(kind, dtype, text, part.compute) for kind in kinds)
    return next((one for one in pairs if one is not None), None)

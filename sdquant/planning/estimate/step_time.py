"""Predict the step time relative to the unquantized model, on CPUs whose kernels were measured.

    step(plan, meta_models.trace_plan(plan), "amx")      0.74: a step takes about three quarters of the time

Each product with a weight takes the measured time of one layer with that many rows (`layer_timings`); products of two
activations and all other operations take the same time for every scheme. The prediction is for one thread without
offloading, and ignores components that run once per image (text encoders and VAEs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...core import dtype_name, gguf_types
from ...models import model_name
from ..component_types import role_of
from .layer_timings import Facts, known

if TYPE_CHECKING:
    from ...models import Product, Trace, Work
    from ..plan import ComponentPlan, Plan

# Other operations: seconds per operation that creates a tensor, and per byte that it writes. Fitted to measured ratios
# in bench/results/whole-*.json: `python -m bench.foreseen --fit`.
OTHER, BYTE = 5e-6, 0.4e-9

# Times that differ by less count as equal: predicted ratios are off by 11 % (root mean square, `python -m
# bench.foreseen`), some by twice as much.
NEAR = 0.10

RULES = "rules"  # a scheme that is defined by its options alone
FLOATS = frozenset(name for name, row in gguf_types.TYPES.items() if row.dtype)  # unquantized GGUF types


def step(plan: Plan, traced: Mapping[str, Trace | None], isa: str) -> float | None:
    """Return the computing time of a step relative to the same model unquantized, both on one CPU.

    Args:
        plan: only components that run in every step count: UNets, transformers.
        traced: result of `meta_models.trace_plan` for it, or for the same model with other schemes.
        isa: instruction set of the C kernels, as in `Machine.native`.

    Returns:
        None if there are no measurements: another device or instruction set, another runtime or scheme, or shapes that
        cannot be traced.
    """
    parts = [part for part in plan.components if (row := role_of(part.name)) is not None and row.name == "model"]
    if plan.device.partition(":")[0] != "cpu" or not parts:
        return None
    ours = floats = 0.0
    for part in parts:
        trace = traced.get(part.name)
        seconds = None if trace is None else products(part, trace.work, isa)
        if trace is None or seconds is None:
            return None
        rest = trace.work.others * OTHER + trace.work.made * BYTE
        ours, floats = ours + seconds[0] + rest, floats + seconds[1] + rest
    return ours / floats if floats else None


def counted(time: float, fastest: float) -> float:
    """Return a predicted time as it counts in a choice: times close to the fastest are equal."""
    return max(time, (1 + NEAR) * fastest)


def knows(isa: str) -> bool:
    """Return whether there are measurements for this instruction set."""
    return any(key[0] == isa for key in known())


def said(ratio: float) -> str:
    """Describe a time ratio."""
    return f"computing a step takes about {max(ratio, 0.01):.2g} of the unquantized model's time"


def products(part: ComponentPlan, work: Work, isa: str) -> tuple[float, float] | None:
    """Return the seconds of all products as planned, and with unquantized weights; None if not measured."""
    if part.weights and (part.runtime != "plain" or part.compute not in (None, "int8")):
        return None
    names = frozenset(product.weight for product in work.products if product.weight is not None)
    schemes = {model_name(weight.name, names) or weight.name: weight.scheme for weight in part.weights}
    ours = floats = 0.0
    for product, times in work.products.items():
        facts = next(iter(_tables(product, isa)), None)
        if facts is None:
            return None
        call, computing = facts.seconds(product.numbers, product.rows)
        scheme = schemes.get(product.weight or "")
        ratios = (1.0, 1.0) if scheme is None or scheme in FLOATS else _ratios(part, scheme, product, isa)
        if ratios is None:
            return None
        floats += times * (call + computing)
        ours += times * (call * ratios[0] + computing * ratios[1])
    return ours, floats


def _tables(product: Product, isa: str) -> list[Facts]:
    """Return the measurements for this layer type, then those for linear layers, in the dtype of the activations."""
    dtype, table = dtype_name(product.dtype), known()
    near = [table.get((isa, kind, dtype)) for kind in (product.kind, "linear")]
    return [one for one in near if one is not None]


def _ratios(part: ComponentPlan, scheme: str, product: Product, isa: str) -> tuple[float, float] | None:
    """Return the ratios of the closest measured layer; 1.0 if it was measured only in another dtype.

    Options have little effect on times except for rules, which they define: those need a measurement of the same rule.
    """
    exact = () if part.spec is None or part.spec.scheme.name != scheme else (str(part.spec),)
    names = exact if scheme == RULES else (*exact, scheme)
    for table in _tables(product, isa):
        ratios = table.ratios(names, product.rows, part.compute)
        if ratios is not None:
            return ratios
    others = (table for key, table in known().items() if key[0] == isa)
    return (1.0, 1.0) if any(table.ratios(names, 1, part.compute) for table in others) else None

"""How long a step will take against the unquantized model's, foreseen on CPUs whose kernels were measured.

    step(plan, networks.trace(plan), "amx")      0.74: a step in about three quarters of the time

Each product with a weight takes what one layer was measured to take for that many rows (`facts`); products of two
activations and all other operations take the same whatever the scheme. It is one thread's time, nothing read from
elsewhere meanwhile; of components that run once an image, text encoders and VAEs, nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...core.gguf_types import TYPES
from ...models.components import model_name
from ..component_types import role_of
from .layer_timings import Facts, known

if TYPE_CHECKING:
    from ...models.activation_memory import Trace
    from ...models.op_counts import Product, Work
    from ..plan import ComponentPlan, Plan

# What else is computed: seconds of an operation that makes a tensor, and of each byte that it makes. Those with which
# the ratios foreseen are nearest to those measured in bench/results/whole-*.json: `python -m bench.foreseen --fit`.
OTHER, BYTE = 5e-6, 0.4e-9

# Times that differ by less are the same: the ratios foreseen are off by 11 % (`python -m bench.foreseen`, root mean
# square of all), some by twice as much.
NEAR = 0.10

RULES = "rules"  # a scheme whose options say everything
FLOATS = frozenset(name for name, row in TYPES.items() if row.dtype)  # of GGUF: held, and computed with, as they are


def step(made: Plan, traced: Mapping[str, Trace | None], isa: str) -> float | None:
    """Computing time of a step over that of the same model unquantized, both on one CPU.

    Args:
        made: only components that run every step count: UNets, transformers.
        traced: what `networks.trace` gave for it, or for another way to quantize it.
        isa: of the C kernels, as `Machine.native` has it.

    Returns:
        None where nothing was measured: another device or instruction set, another runtime or scheme, or shapes that do
        not tell.
    """
    parts = [part for part in made.components if (row := role_of(part.name)) is not None and row.name == "model"]
    if made.device.partition(":")[0] != "cpu" or not parts:
        return None
    ours = floats = 0.0
    for part in parts:
        trace = traced.get(part.name)
        found = None if trace is None else products(part, trace.work, isa)
        if trace is None or found is None:
            return None
        rest = trace.work.others * OTHER + trace.work.made * BYTE
        ours, floats = ours + found[0] + rest, floats + found[1] + rest
    return ours / floats if floats else None


def counted(time: float, fastest: float) -> float:
    """A foreseen time as it counts in a choice: what is nearly as fast as the fastest is as fast."""
    return max(time, (1 + NEAR) * fastest)


def knows(isa: str) -> bool:
    """Whether anything was measured with these C kernels."""
    return any(key[0] == isa for key in known())


def said(ratio: float) -> str:
    """In words."""
    return f"computing a step takes about {max(ratio, 0.01):.2g} of the unquantized model's time"


def products(part: ComponentPlan, work: Work, isa: str) -> tuple[float, float] | None:
    """Seconds of the products as planned, and with every weight a float; None where nothing was measured."""
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
    """Those of this kind of layer, and of linear ones, which are its nearest; in the dtype of its activations."""
    dtype, table = str(product.dtype).removeprefix("torch."), known()
    near = [table.get((isa, kind, dtype)) for kind in (product.kind, "linear")]
    return [one for one in near if one is not None]


def _ratios(part: ComponentPlan, scheme: str, product: Product, isa: str) -> tuple[float, float] | None:
    """Of the nearest layers that were measured. In another dtype alone: taken for no faster than floats.

    Options change what a layer takes a little, but for rules: there they say all, and what was measured is of the same.
    """
    exact = () if part.spec is None or part.spec.scheme.name != scheme else (str(part.spec),)
    names = exact if scheme == RULES else (*exact, scheme)
    for table in _tables(product, isa):
        found = table.ratios(names, product.rows, part.compute)
        if found is not None:
            return found
    others = (table for key, table in known().items() if key[0] == isa)
    return (1.0, 1.0) if any(table.ratios(names, 1, part.compute) for table in others) else None

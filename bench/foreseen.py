"""What `sdquant.planning.estimate.step_time` says of a step, against what was measured in bench/results/whole-*.json.

    python -m bench.foreseen             every model and scheme that was measured on a CPU
    python -m bench.foreseen --fit       which OTHER and BYTE would be nearest

Nothing is timed: shapes are traced. The models are those of `bench.whole_models`, without weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.models import MODELS
from sdquant import backends, demo
from sdquant.compat.row import meant
from sdquant.models import activation_memory, components, dummy_inputs
from sdquant.planning import plan, weight_selection
from sdquant.planning.estimate import meta_models, step_time

if TYPE_CHECKING:
    from sdquant.models.op_counts import Work

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """A scheme in a file: seconds of its products and of the unquantized model's, the rest, and the measured ratio."""

    file: str
    scheme: str
    ours: float
    floats: float
    work: Work
    measured: float

    def ratio(self, other: float = step_time.OTHER, byte: float = step_time.BYTE) -> float:
        """Of a step, as foreseen."""
        rest = self.work.others * other + self.work.made * byte
        return (self.ours + rest) / (self.floats + rest)


@cache
def traced(model: str, size: tuple[int, int]) -> tuple[torch.nn.Module, Work]:
    """A UNet or transformer on the meta device, and what a step computes."""
    if model in demo.MODELS:
        made = planner_of(model)
        name = next(name for name in ("unet", "transformer") if name in {part.name for part in made.components})
        trace = meta_models.trace_plan(made)[name]
        assert trace is not None
        return meta_models.of_plan(made)[name].module, trace.work
    config = dict(MODELS[model].config)
    module: Any = components.empty("diffusers", config["_class_name"], config)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    _, given = dummy_inputs.random(config["_class_name"], module.config, size, 1, 0)
    return module, activation_memory.trace_of(
        module, **dummy_inputs.moved(given, torch.device("cpu"), torch.bfloat16)
    ).work


@cache
def planner_of(model: str) -> plan.Plan:
    """A shipped model's plan."""
    import sdquant

    return sdquant.plan(demo.path(model), device="cpu")


def part_of(module: torch.nn.Module, scheme: str, runtime: str | None, compute: str | None) -> plan.ComponentPlan:
    """What a load with this scheme would hold."""
    spec = backends.parse(scheme)
    shapes = {name: (tuple(one.shape), "bfloat16") for name, one in module.named_parameters()}
    weights, kept = weight_selection.select(shapes, spec, runtime or spec.scheme.runtimes[0], (), type(module).__name__)
    return plan.ComponentPlan(
        name="model", class_name=type(module).__name__, action="encode", scheme=spec.scheme.name, mode="pre",
        runtime="plain", weights=weights, kept=kept, bytes=0, bytes_bf16=0, spec=spec, compute=compute,
    )  # fmt: skip


def cases(names: tuple[str, ...] = ()) -> Iterator[Case]:
    """Of all files that were measured on a CPU, or those of some models."""
    for file in sorted(RESULTS.glob("whole-*.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["device"] != "cpu" or (names and values["model"] not in names):
            continue
        module, work = traced(values["model"], tuple(values["size"]))
        said = values["settings"]
        for row in values["rows"]:
            if row["by"] != "sdquant" or row["quant"] is None or row["ratio"] is None:
                continue
            part = part_of(module, row["quant"], meant(said.get("runtime"), said.get("compute")), said.get("compute"))
            found = step_time.products(part, work, values["machine"]["native"])
            if found is not None:
                yield Case(file.stem, row["quant"], *found, work, row["ratio"])


def distance(some: list[Case], other: float, byte: float) -> float:
    """Root of the mean square of the logarithms of foreseen over measured; each file counts the same."""
    files: dict[str, list[float]] = {}
    for case in some:
        files.setdefault(case.file, []).append(math.log(case.ratio(other, byte) / case.measured) ** 2)
    return math.sqrt(sum(sum(one) / len(one) for one in files.values()) / len(files))


def main() -> None:
    """Print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", help="default: all")
    parser.add_argument("--fit", action="store_true", help="which numbers for all other operations are nearest")
    args = parser.parse_args()
    some = list(cases(tuple(args.model)))
    for name, group in itertools.groupby(some, key=lambda case: case.file):
        print(name)
        for case in group:
            print(f"  {case.scheme:12} foreseen {case.ratio():.2f}  measured {case.measured:.2f}")
    print(f"off by {distance(some, step_time.OTHER, step_time.BYTE):.1%} in all")
    if args.fit:
        grid = itertools.product((n * 1e-6 for n in range(0, 80, 5)), (n * 5e-11 for n in range(25)))
        best = min(grid, key=lambda two: distance(some, *two))
        print(f"OTHER = {best[0]:.2g}, BYTE = {best[1]:.2g}: off by {distance(some, *best):.1%}")


if __name__ == "__main__":
    main()

"""What `sdquant.planning.estimate.step_time` says of a step, against what was measured in bench/results/whole-*.json on
a machine with the same instructions as this one.

    python -m bench.foreseen             every model and scheme
    python -m bench.foreseen sd15        one model

Shapes are traced, and layers timed as a plan does it. The models are those of `bench.whole_models`, without weights.
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
from sdquant.kernels import cpu_state
from sdquant.models import activation_memory, components, dummy_inputs
from sdquant.planning import plan, weight_selection
from sdquant.planning.estimate import layer_timings, meta_models, step_time

if TYPE_CHECKING:
    from sdquant.models.op_counts import Work

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """A scheme in a file: the ratio of a step that is foreseen, and the measured one."""

    file: str
    scheme: str
    ratio: float
    measured: float


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


def cases(names: tuple[str, ...] = (), folder: Path = RESULTS) -> Iterator[Case]:
    """Of all files that were measured on CPUs like this one, or those of some models."""
    other = layer_timings.others()
    assert other is not None
    for file in sorted(folder.glob("whole-*.json")):
        values = json.loads(file.read_text(encoding="utf-8"))
        alike = values["device"] == "cpu" and values["machine"]["native"] == cpu_state()
        if not alike or (names and values["model"] not in names):
            continue
        module, work = traced(values["model"], tuple(values["size"]))
        rest = work.others * other[0] + work.made * other[1]
        said = values["settings"]
        for row in values["rows"]:
            if row["by"] != "sdquant" or row["quant"] is None or row["ratio"] is None:
                continue
            part = part_of(module, row["quant"], meant(said.get("runtime"), said.get("compute")), said.get("compute"))
            found = step_time.products(part, work)
            if found is not None:
                yield Case(file.stem, row["quant"], (found[0] + rest) / (found[1] + rest), row["ratio"])


def distance(some: list[Case]) -> float:
    """Root of the mean square of the logarithms of foreseen over measured; each file counts the same."""
    files: dict[str, list[float]] = {}
    for case in some:
        files.setdefault(case.file, []).append(math.log(case.ratio / case.measured) ** 2)
    return math.sqrt(sum(sum(one) / len(one) for one in files.values()) / len(files))


def main() -> None:
    """Print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", help="default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of what was measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    some = list(cases(tuple(args.model), args.results))
    for name, group in itertools.groupby(some, key=lambda case: case.file):
        print(name)
        for case in group:
            print(f"  {case.scheme:12} foreseen {case.ratio:.2f}  measured {case.measured:.2f}")
    print(f"off by {distance(some):.1%} in all")


if __name__ == "__main__":
    main()

"""Turn a request into a plan. Everything that can be refused is refused here, after reading only headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import compat
from ..compat import hardware
from ..core import LONE
from ..errors import MissingComponentError
from ..formats import main_dtype
from ..models import class_of
from ..rules import MixSpec, RulesSpec, require_magnitudes, require_ranges, unweighed
from . import planner
from .request import Request, make_request
from .resolve import Resolved, completed, device_of, prequantized_schemes, resolve
from .rule_checks import Marked, marked_in_file, refuse_computing
from .statistics_arguments import refuse_other_weights

if TYPE_CHECKING:
    from ..core import QuantSpec
    from ..formats import Checkpoint
    from . import plan as planner_plan
    from .mix import Beside


def plan(
    path: str | Path,
    quant: str | Mapping[str, str | None] | None = None,
    offload: str = "none",
    **values: Any,
) -> planner_plan.Plan:
    """Plan what `load_model` with the same arguments would do, with sizes in bytes. Reads only headers, and the weights
    for a mix, or some values of a few with quant_stats.

    Raises:
        SdquantError: any error that `load_model` would raise before reading weights.
    """
    return prepare(make_request(path, quant=quant, offload=offload, **values))


def prepare(
    request: Request,
    machine: hardware.Machine | None = None,
    *,
    convert: bool = False,
    read: bool = True,
    on_weights: Callable[[int, int], object] | None = None,
    beside: Beside | None = None,
) -> planner_plan.Plan:
    """Check and plan a request. Everything that can be refused is refused here, after reading only headers, but for a
    mix, whose errors are measured, and for statistics, which may be those of other weights.

    The matrix is consulted twice: first for the request, before any file is opened; then for the schemes in the files.
    Only after that are the files checked against their own headers and their models.

    Args:
        machine: the one that the plan is for; None for this one.
        convert: dequantize components that are quantized on disk, and quantize them to the requested scheme. False
            refuses a request for another scheme.
        read: whether a mix may read the weights, which takes as long as reading them all does the first time. False
            plans it by what is typical of schemes and layers, unless they were read before, and takes quant_stats for
            those of the model.
        on_weights: called with the number of weights of a component that were read for a mix, and of all.
        beside: returns the bytes that count towards the size of a mix beside those of weights; see `Beside`.
    """
    here = machine or hardware.probe()
    device = device_of(request, here)
    if request.automatic:
        from . import auto, mix

        whole = mix.open_mix(request, here) if request.mixed else auto.resolve(request, here)
        origin = _origin(whole, read)  # before all weights are read for a mix
        if request.mixed:
            whole = mix.resolve_mix(whole, here, read=read, on_weights=on_weights, beside=beside)
        check_schemes(request, whole.specs, whole.offload_mode.name, device, here)
        _check_files(whole, here)
    else:
        check_schemes(request, request.specs, request.offload, device, here)
        found = resolve(request, device)
        _check_files(found, here)
        again = planner.to_quantize_again(found) if convert else frozenset()
        planner.refuse_conflicts(found, again)
        whole = completed(found, again)
        origin = _origin(whole, read)
    plan = plan_resolved(whole, here)
    remarks = (*origin, *_second_roundings(plan), *_needs(plan), *_slow_floats(plan, here))
    return dataclasses.replace(plan, warnings=(*plan.warnings, *remarks))


def _origin(resolved: Resolved, read: bool) -> tuple[str, ...]:
    """Return what `refuse_other_weights` says of the components to quantize; nothing where no weight may be read."""
    return refuse_other_weights(resolved.request.quant_stats if read else None, planner.floats_to_quantize(resolved))


def plan_resolved(
    resolved: Resolved,
    here: hardware.Machine,
    marked: Callable[[str, Checkpoint, RulesSpec], Marked] = marked_in_file,
) -> planner_plan.Plan:
    """Return the plan for a request that has been checked against the matrix and its files.

    Args:
        marked: see `planner.build_plan`.
    """
    plan = planner.build_plan(resolved, here, marked=marked)
    warnings = list(plan.warnings)
    for part in plan.components:
        if part.spec is None:
            continue
        shapes = plan.detected.sources[part.name].tensors
        weights = [(one.name, shapes[one.name].shape) for one in part.weights if one.name in shapes]  # not packed ones
        if isinstance(part.spec, RulesSpec):
            require_ranges(part.spec, weights)
        else:
            require_magnitudes(part.spec, weights)
            warnings += unweighed(part.spec, weights, "" if part.name == LONE else part.name)
    return dataclasses.replace(plan, warnings=tuple(warnings))


def check_schemes(
    request: Request, specs: Mapping[str, QuantSpec | None], offload: str, device: str, here: hardware.Machine
) -> None:
    """Check what is to be quantized against the rest of the request, and against the matrix. A gguf scheme is not
    refused yet: the file may be quantized to it."""
    for spec in specs.values():
        refuse_computing(spec, request.compute)
    specs = {name: spec for name, spec in specs.items() if not isinstance(spec, MixSpec)}  # of what works, by itself
    named = {name: str(spec) for name, spec in specs.items() if spec is not None}
    quant = None if not named else (named.get("*") if set(named) == {"*"} else named)
    _check(request, quant, request.mode, request.plain_runtime, offload, device, here)


def _check_files(resolved: Resolved, here: hardware.Machine) -> None:
    """Consult the matrix for what is quantized on disk."""
    for scheme, plain_only in prequantized_schemes(resolved.detected):
        runtime = "plain" if plain_only else resolved.request.plain_runtime
        _check(resolved.request, scheme, "found", runtime, resolved.offload_mode.name, resolved.device, here)


def _check(
    request: Request, quant: Any, mode: str, runtime: str | None, offload: str, device: str, here: hardware.Machine
) -> None:
    compat.check(
        quant, offload, mode=mode, runtime=runtime, device=device, machine=here, compute=request.compute,
        allow_incompatible=request.allow_incompatible,
    )  # fmt: skip


def _second_roundings(plan: planner_plan.Plan) -> list[str]:
    """Return a warning for each component whose weights are quantized again."""
    return [
        rounded_twice(src.path, sorted(set(src.origins.values())))
        for src in plan.detected.sources.values()
        if src.origins
    ]


def rounded_twice(path: str | Path, schemes: Sequence[str]) -> str:
    """Return the warning about a component that is converted from one quantized format to another."""
    return (
        f"the weights of {path} are quantized already ({', '.join(schemes)}), and are rounded a second time: "
        "converting the unquantized model gives better ones"
    )


def _slow_floats(plan: planner_plan.Plan, here: hardware.Machine) -> list[str]:
    """Return a warning if the model would be computed in float16 on a CPU that has instructions for bf16."""
    dtype = plan.dtype or main_dtype(*plan.detected.sources.values(), recorded=True)
    if plan.device != "cpu" or not here.has_bf16 or dtype != "float16":
        return []
    return [
        "the model is computed in float16, which takes about twice as long as bfloat16 on this CPU: choose bfloat16 as "
        "its dtype"
    ]


def _needs(plan: planner_plan.Plan) -> list[str]:
    """Return a warning if a single file can be planned, but not loaded without a config."""
    lone = plan.detected.sources.get(LONE)
    try:
        if lone is not None:
            class_of(lone)
    except MissingComponentError as error:
        return [f"load_model cannot load it on its own: {error.why}. {error.fix}"]
    return []

"""Turn a request into a plan. Everything that can be refused is refused here, after reading only headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import compat
from ..compat import hardware
from ..core.choices import LONE
from ..errors import MissingComponentError
from ..models.classes import class_of
from ..rules.quant_spec import RulesSpec
from ..rules.range_checks import require_ranges
from . import planner
from .component_sources import whole_of
from .request import Request, request
from .resolve import device_of, located, prequantized_schemes, with_dtype
from .rule_checks import marked_in_file

if TYPE_CHECKING:
    from . import plan as planner_plan


def plan(
    path: str | Path,
    quant: str | Mapping[str, str | None] | None = None,
    offload: str = "none",
    **values: Any,
) -> planner_plan.Plan:
    """Plan what `load_model` with the same arguments would do, with sizes in bytes. Reads only headers.

    Raises:
        SdquantError: any error that `load_model` would raise before reading weights.
    """
    return prepare(request(path, quant=quant, offload=offload, **values))


def prepare(request: Request) -> planner_plan.Plan:
    """Check and plan a request. Everything that can be refused is refused here, after reading only headers.

    The matrix is consulted twice: first for the request, before any file is opened; then for the schemes in the files.
    Only after that are the files checked against their own headers.
    """
    here = hardware.probe()
    why = step_ratio = None
    if request.automatic:
        from . import auto

        resolved = auto.resolve(request, here)
        request, why, step_ratio = resolved.request, resolved.why, resolved.foreseen
    device = device_of(request, here)

    def check(quant: Any, mode: str, runtime: str | None = request.plain_runtime) -> None:
        compat.check(
            quant, request.offload, mode=mode, runtime=runtime, device=device, machine=here, compute=request.compute,
            allow_incompatible=request.allow_incompatible,
        )  # fmt: skip

    # A gguf scheme is not refused yet, since the file may be quantized to it.
    named = {name: str(spec) for name, spec in request.specs().items() if spec is not None}
    check(None if not named else (named.get("*") if set(named) == {"*"} else named), request.mode)
    request = located(request)
    detected = whole_of(request, complete=False)
    for scheme, plain_only in prequantized_schemes(detected):
        check(scheme, "found", runtime="plain" if plain_only else request.plain_runtime)
    request = with_dtype(request, detected)
    planner.build_plan(request, detected, device=device)  # conflicts, and schemes that exist only in files
    whole = whole_of(request, complete=True)
    plan = planner.build_plan(request, whole, device=device, versions=here.versions, marked=marked_in_file)
    for part in plan.components:
        if isinstance(part.spec, RulesSpec):
            shapes = plan.detected.sources[part.name].tensors
            require_ranges(part.spec, ((weight.name, shapes[weight.name].shape) for weight in part.weights))
    return dataclasses.replace(plan, why=why, foreseen=step_ratio, warnings=(*plan.warnings, *_needs(plan)))


def _needs(plan: planner_plan.Plan) -> list[str]:
    """Return a warning if a single file can be planned, but not loaded without a config."""
    lone = plan.detected.sources.get(LONE)
    try:
        if lone is not None:
            class_of(lone)
    except MissingComponentError as error:
        return [f"load_model cannot load it on its own: {error.why}. {error.fix}"]
    return []

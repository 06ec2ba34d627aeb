"""Turn a request into a plan. Everything that can be refused is refused here, after reading only headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import compat
from ..compat import hardware
from ..errors import MissingComponentError
from ..models.classes import class_of
from ..rules.quant_spec import RulesSpec
from ..rules.range_checks import require_ranges
from . import planner
from .component_sources import whole_of
from .request import Request, request
from .resolve import device_of, held, located, with_dtype
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


def prepare(asked: Request) -> planner_plan.Plan:
    """Check and plan a request. Everything that can be refused is refused here, after reading only headers.

    The matrix is consulted twice: first for the request, before any file is opened; then for the schemes in the files.
    Only after that are the files checked against their own headers.
    """
    here = hardware.probe()
    why = foreseen = None
    if asked.automatic:
        from . import auto

        chosen = auto.resolve(asked, here)
        asked, why, foreseen = chosen.request, chosen.why, chosen.foreseen
    device = device_of(asked, here)

    def check(quant: Any, mode: str, runtime: str | None = asked.plain_runtime) -> None:
        compat.check(
            quant, asked.offload, mode=mode, runtime=runtime, device=device, machine=here, compute=asked.compute,
            allow_incompatible=asked.allow_incompatible,
        )  # fmt: skip

    # A gguf scheme is not refused yet, since the file may be quantized to it.
    named = {name: str(spec) for name, spec in asked.specs().items() if spec is not None}
    check(None if not named else (named.get("*") if set(named) == {"*"} else named), asked.mode)
    asked = located(asked)
    seen = whole_of(asked, complete=False)
    for scheme, plain_only in held(seen):
        check(scheme, "found", runtime="plain" if plain_only else asked.plain_runtime)
    asked = with_dtype(asked, seen)
    planner.make(asked, seen, device=device)  # conflicts, and schemes that exist only in files
    whole = whole_of(asked, complete=True)
    made = planner.make(asked, whole, device=device, versions=here.versions, marked=marked_in_file)
    for part in made.components:
        if isinstance(part.spec, RulesSpec):
            shapes = made.detected.sources["." if part.name == "model" else part.name].tensors
            require_ranges(part.spec, ((weight.name, shapes[weight.name].shape) for weight in part.weights))
    return dataclasses.replace(made, why=why, foreseen=foreseen, warnings=(*made.warnings, *_needs(made)))


def _needs(made: planner_plan.Plan) -> list[str]:
    """Return a warning if a single file can be planned, but not loaded without a config."""
    lone = made.detected.sources.get(".")
    try:
        if lone is not None:
            class_of(lone)
    except MissingComponentError as error:
        return [f"load_model cannot load it on its own: {error.why}. {error.fix}"]
    return []

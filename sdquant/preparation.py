"""From a request to a plan: everything that can be refused is refused here, from headers at most."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import compat, detection, machine, planner
from .backends.gguf import READ_DTYPE
from .errors import BackendUnavailableError, MissingComponentError
from .gathering import lender, look, whole_of, with_base
from .models.classes import class_of
from .planning.places import CHECKPOINT
from .request import Request, request
from .rules.planning import marked_in_file
from .rules.ranges import require_ranges
from .rules.spec import RulesSpec


def plan(
    path: str | Path,
    quant: str | Mapping[str, str | None] | None = None,
    offload: str = "none",
    **values: Any,
) -> planner.Plan:
    """What `load_model` with the same arguments would do, and the bytes of it; headers are all that is read.

    Raises:
        SdquantError: what `load_model` would raise before reading weights.
    """
    return prepare(request(path, quant=quant, offload=offload, **values))


def prepare(asked: Request) -> planner.Plan:
    """Check and plan a request. Everything that can be refused is refused here, from headers at most.

    The matrix is asked twice: first with what the request says, before any file is opened; then with what the files
    hold. Only after that are the files held against their own headers.
    """
    here = machine.probe()
    why = foreseen = None
    if asked.automatic:
        from . import automatic

        chosen = automatic.resolve(asked, here)
        asked, why, foreseen = chosen.request, chosen.why, chosen.foreseen
    device = device_of(asked, here)

    def check(quant: Any, mode: str, runtime: str | None = asked.plain_runtime) -> None:
        compat.check(
            quant, asked.offload, mode=mode, runtime=runtime, device=device, machine=here, compute=asked.compute,
            allow_incompatible=asked.allow_incompatible,
        )  # fmt: skip

    # A gguf scheme on a file that may hold it is not yet a refusal.
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


def _needs(made: planner.Plan) -> list[str]:
    """What loading will ask for beside a lone file, whose weights can be planned without it."""
    lone = made.detected.sources.get(".")
    try:
        if lone is not None:
            class_of(lone)
    except MissingComponentError as error:
        return [f"load_model cannot load it alone: {error.why}. {error.fix}"]
    return []


def device_of(asked: Request, here: machine.Machine) -> str:
    """The compute device of a request.

    Raises:
        BackendUnavailableError: this machine has none of that kind.
    """
    device = asked.device or machine.default_device(here)
    if machine.device_kind(device, here) not in here.kinds:
        raise BackendUnavailableError(
            f"Device {device!r} was asked for",
            f"torch sees {', '.join(here.kinds)} on this machine",
            "Leave device out, or see `sdquant doctor` for what is missing",
        )
    return device


def located(asked: Request) -> Request:
    """The request with the place of its files, and with a base where it needs one."""
    from .planning import fetching

    asked = with_base(fetching.fetched(asked))
    return dataclasses.replace(asked, revision=None, subfolder=None, token=None)  # what they were for is done


def held(seen: detection.Detected) -> list[tuple[str, bool]]:
    """The schemes that the files hold already, each with whether only plain layers run it. One file may hold several,
    as one whose layers two libraries have quantized; of GGUF, whose types mix, the main one stands for all."""
    rows: set[tuple[str, bool]] = set()
    for part in (seen.parts or {".": seen}).values():
        for src in part.sources.values():
            main = {part.quant} if part.quant else set()
            mixed = set() if src.container == "gguf" else {found.scheme for found in src.found.values()}
            rows |= {(scheme, src.plain_only) for scheme in mixed or main}
    return sorted(rows)


def with_dtype(asked: Request, seen: detection.Detected) -> Request:
    """The request with the dtype to bring all floats to, where it names none and one is needed."""
    return dataclasses.replace(asked, dtype=asked.dtype or _one_dtype(asked, seen))


def _one_dtype(asked: Request, seen: detection.Detected) -> str | None:
    """The dtype to bring all floats to where the files hold several that do not compute together; None: as they are.

    That is so where a lone component joins the others of its base, in checkpoints of several (whose VAE is often in
    F32), and in GGUF files, which keep small tensors in F32. The dtype with the most bytes decides: for a lone
    component that in the base, else in the file. A GGUF file of ours says what it was made from.
    """
    lone = look(asked, complete=False)
    base = lender(asked, lone, complete=False)
    if base is None:
        packed = any(src.container == "gguf" for src in seen.sources.values())
        return _most(seen) if packed else None
    if lone.component == CHECKPOINT:
        return _most(lone)
    lent = {name: src for name, src in base.sources.items() if not name.startswith("vae")}  # which is often in F32
    return _most(dataclasses.replace(base, sources=lent)) or _most_of_lone(seen)


def _most_of_lone(seen: detection.Detected) -> str:
    """The same for a base that lends only configs: the main component's. That of packed weights where it has no other:
    the F32 of a GGUF file, which its small tensors are in whatever they were, says nothing."""
    main = next((seen.sources[name] for name in detection.MAIN if name in seen.sources), None)
    said = _most(dataclasses.replace(seen, sources={} if main is None else {"main": main}))
    foreign = main is not None and main.container == "gguf" and main.named_dtype is None
    return READ_DTYPE if said is None or (foreign and said == "float32") else said


def _most(seen: detection.Detected) -> str | None:
    """The float dtype with the most bytes; None if there are no floats."""
    sizes: Counter[str] = Counter()
    for src in seen.sources.values():
        for info in src.plain.values():
            if info.dtype in ("float32", "float16", "bfloat16"):
                sizes[src.named_dtype or info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else None

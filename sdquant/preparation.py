"""From a request to a plan: everything that can be refused is refused here, from headers at most."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import compat, detection, machine, planner
from .errors import BackendUnavailableError, MissingComponentError, UnsupportedFileError
from .formats import families
from .request import Request, request

if TYPE_CHECKING:
    from .formats.source import Source

log = logging.getLogger(__name__)


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
    device = asked.device or machine.default_device(here)
    kind = machine.device_kind(device, here)
    if kind not in here.kinds:
        raise BackendUnavailableError(
            f"Device {device!r} was asked for",
            f"torch sees {', '.join(here.kinds)} on this machine",
            "Leave device out, or see `sdquant doctor` for what is missing",
        )

    def check(quant: Any, mode: str, source: str = "weights") -> None:
        compat.check(
            quant, asked.offload, mode=mode, runtime=asked.runtime, device=device, machine=here, source=source,
            allow_incompatible=asked.allow_incompatible,
        )  # fmt: skip

    # A gguf scheme on a file that may hold it is not yet a refusal.
    named = {name: str(spec) for name, spec in asked.specs().items() if spec is not None}
    check(None if not named else (named.get("*") if set(named) == {"*"} else named), asked.mode)
    place = resolve(asked)
    asked = dataclasses.replace(asked, path=str(place))
    seen = whole_of(asked, complete=False)
    for scheme in sorted({part.quant for part in (seen.parts or {".": seen}).values() if part.quant}):
        check(scheme, "found")
    asked = dataclasses.replace(asked, dtype=asked.dtype or _one_dtype(asked, seen))
    planner.make(asked, seen, device=device)  # conflicts, and schemes that exist only in files
    return planner.make(asked, whole_of(asked, complete=True), device=device)


def _one_dtype(asked: Request, seen: detection.Detected) -> str | None:
    """The dtype to bring all floats to where the files hold several that do not compute together; None: as they are.

    That is so where a lone component joins the others of its base, and in GGUF files, which keep small tensors in F32.
    The dtype with the most bytes decides: in the base, else in the file.
    """
    if asked.base is not None:
        seen = detection.detect(asked.base, complete=False)
    elif not any(src.container == "gguf" for src in seen.sources.values()):
        return None
    sizes: Counter[str] = Counter()
    for src in seen.sources.values():
        for info in src.plain.values():
            if info.dtype in ("float32", "float16", "bfloat16"):
                sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else None


def resolve(asked: Request) -> Path:
    """The file or folder of a request's path, downloaded if it is a hub id."""
    # os.path's functions say no where Path's raise: a name that is too long, a user that does not exist.
    place = Path(os.path.expanduser(asked.path))
    if os.path.exists(place) or asked.path.count("/") != 1 or asked.path.startswith((".", "/", "~")):
        return place
    from . import components

    return components.hub_folder(asked.path, progress=asked.progress)


def whole_of(asked: Request, *, complete: bool) -> detection.Detected:
    """What the path holds; with a base, the base's components with the lone one in its place."""
    seen = detection.detect(asked.path, complete=complete)
    if asked.base is None:
        return seen
    base = detection.detect(asked.base, complete=complete)
    if seen.container == "pipeline" or base.container != "pipeline":
        raise MissingComponentError(
            f"{asked.path} was to be loaded with base={asked.base}",
            "base is for a lone component, and must be a pipeline folder",
            "Leave base out" if seen.container == "pipeline" else "Give the folder with the model_index.json",
        )
    lone = seen.sources["."]
    row = families.recognise(lone.names)
    name = _place(seen, base)
    owner = base.sources[name]
    parts = {
        name: dataclasses.replace(
            lone, config=lone.config or owner.config, library=owner.library, class_name=owner.class_name
        )
    }
    if complete and row is not None and row.foreign:
        parts = _translated(lone, base, None if row.component == "checkpoint" else name)
    return dataclasses.replace(
        base,
        path=asked.path,
        quant=seen.quant or base.quant,
        backend=seen.backend or base.backend,
        prequantized=seen.prequantized or base.prequantized,
        evidence=[f"{name}: {line}" for line in seen.evidence],
        warnings=[*base.warnings, *seen.warnings],
        parts=base.parts | {name: seen},
        sources={**base.sources, **parts},
    )


def _translated(lone: Source, base: detection.Detected, only: str | None) -> dict[str, Source]:
    """The components of a file in a foreign layout, under the names of the base's; of a checkpoint all that it has."""
    from . import foreign

    owners = base.sources if only is None else {only: base.sources[only]}
    made = {name: foreign.convert(lone, name, owner) for name, owner in owners.items()}
    parts = {name: src for name, src in made.items() if src is not None}
    if not parts:
        raise UnsupportedFileError(
            f"{lone.path} was to take its place in {base.path}",
            f"diffusers has no key map from its layout to {', '.join(str(src.class_name) for src in owners.values())}",
            "Use the same model as a diffusers folder",
        )
    left = [name for name in foreign.unused(lone, parts.values()) if not foreign.idle(name)]
    if left:
        log.warning(
            "%s holds %d tensors that no component has a place for, the first is %r", lone.path, len(left), left[0]
        )
    return parts


def _place(seen: detection.Detected, base: detection.Detected) -> str:
    """Which component of the base a lone one replaces: that with its tensor names, or of the same kind. For a
    checkpoint of several, the main one."""
    names = seen.sources["."].names
    shared = {name: len(src.names & names) / max(len(src.names), 1) for name, src in base.sources.items()}
    best = max(shared, key=lambda name: shared[name])
    if shared[best] > 0.9:
        return best
    kind = seen.component or ""
    if kind in base.sources:
        return kind
    if kind == "checkpoint":
        return next(name for name in (*detection.MAIN, *base.sources) if name in base.sources)
    raise MissingComponentError(
        f"{seen.path} was to take its place in {base.path}",
        f"it is {kind or 'of an unknown kind'}, and the pipeline has {', '.join(base.sources)}",
        "Give the pipeline folder of the same model as base",
    )

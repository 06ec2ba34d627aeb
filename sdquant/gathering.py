"""Which files make up the model that was asked for: those of the path, and of its base."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import detection
from .errors import MissingComponentError, UnsupportedFileError
from .formats import configs, families
from .formats.strays import refuse_strays

if TYPE_CHECKING:
    from .formats.source import Source
    from .request import Request

log = logging.getLogger(__name__)


def with_base(asked: Request) -> Request:
    """The request with a base, where one is needed and not given: a checkpoint of several models has no configs, no
    tokenizers and no scheduler, and diffusers knows from which repository to take them.

    Raises:
        MissingComponentError: they cannot be had.
    """
    seen = detection.detect(asked.path, complete=False)
    row = families.recognise(seen.sources["."].names) if asked.base is None and "." in seen.sources else None
    if row is None or row.component != "checkpoint":
        return asked
    from . import components

    lone = seen.sources["."]
    name = components.reference({key: info.shape for key, info in lone.tensors.items()})
    try:
        folder = components.hub_folder(name, progress=asked.progress, weights=False)
    except MissingComponentError as error:
        raise MissingComponentError(
            f"{asked.path} was to be loaded",
            f"it is a checkpoint of {seen.family} in the {row.layout} layout, which has neither configs nor "
            f"tokenizers, and those of {name} could not be had: {error.__cause__}".splitlines()[0],
            "Give base=<pipeline folder of the same model> (its weights are not needed), or connect to the hub once",
        ) from error
    return dataclasses.replace(asked, base=str(folder))


def whole_of(asked: Request, *, complete: bool) -> detection.Detected:
    """What the path holds; with a base, the base's components with the lone one in its place."""
    seen = detection.detect(asked.path, complete=complete)
    if complete:
        for src in seen.sources.values():
            refuse_strays(src.path, src.plain)
    if asked.base is None:
        return _with_config(seen) if complete else seen
    base = detection.detect_base(asked.base, complete=complete)
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
    sources = {**base.sources, **parts}
    if complete:
        _refuse_missing(asked, sources)
    return dataclasses.replace(
        base,
        path=asked.path,
        quant=seen.quant or base.quant,
        backend=seen.backend or base.backend,
        prequantized=seen.prequantized or base.prequantized,
        evidence=[f"{name}: {line}" for line in seen.evidence],
        warnings=[*base.warnings, *seen.warnings],
        parts=base.parts | {name: seen},
        sources=sources,
    )


def _with_config(seen: detection.Detected) -> detection.Detected:
    """A lone UNet or transformer in a foreign layout under diffusers' names, if its config is beside it or known."""
    lone = seen.sources.get(".")
    row = families.recognise(lone.names) if lone is not None else None
    if lone is None or row is None or not row.foreign or row.component == "checkpoint":
        return seen
    from . import foreign

    config = lone.config or configs.known(seen.family, foreign.shapes(lone))
    if not isinstance(config.get("_class_name"), str):
        return seen
    owner = dataclasses.replace(lone, config=config, library="diffusers", class_name=str(config["_class_name"]))
    made = foreign.convert(lone, row.component, owner)
    return seen if made is None else dataclasses.replace(seen, class_name=made.class_name, sources={".": made})


def _refuse_missing(asked: Request, sources: Mapping[str, Source]) -> None:
    """Raise MissingComponentError for components that neither the file nor the base has weights for."""
    missing = [name for name, src in sources.items() if src.empty]
    if missing:
        places = ", ".join(str(sources[name].path) for name in missing)
        raise MissingComponentError(
            f"{asked.path} was to be loaded with base={asked.base}",
            f"neither of them has weights for {' and '.join(missing)}",
            f"Put those of the same model into {places}, or give a base that has them",
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

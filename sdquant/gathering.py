"""Which files make up the model that was asked for: those of the path, and of its base."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import detection
from .errors import MissingComponentError, UnsupportedFileError
from .formats import configs, families, text
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
    seen = detection.detect(asked.path, complete=False, allow_pickle=asked.allow_pickle)
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
    seen = _gathered(asked, complete=complete)
    return dataclasses.replace(seen, sources={name: text.tidied(src) for name, src in seen.sources.items()})


def _gathered(asked: Request, *, complete: bool) -> detection.Detected:
    seen = detection.detect(asked.path, complete=complete, allow_pickle=asked.allow_pickle)
    if complete:
        for src in seen.sources.values():
            refuse_strays(src.path, src.plain)
    if asked.base is None:
        return _with_config(seen) if complete else seen
    base = detection.detect_base(asked.base, complete=complete, allow_pickle=asked.allow_pickle)
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
        parts = _translated(lone, base, name)
    elif complete:
        from . import foreign

        parts = {name: foreign.with_projection(parts[name])}
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


def _translated(lone: Source, base: detection.Detected, main: str) -> dict[str, Source]:
    """The components of a file in a foreign layout, under the names of the base's: the main one (a UNet or transformer)
    and what else the file has."""
    from . import foreign

    owners = {name: src for name, src in base.sources.items() if name == main or foreign.beside(name, src)}
    made = {name: foreign.convert(lone, name, owner) for name, owner in owners.items()}
    parts = {name: src for name, src in made.items() if src is not None}
    if not parts:
        raise UnsupportedFileError(
            f"{lone.path} was to take its place in {base.path}",
            f"diffusers has no key map from its layout to {owners[main].class_name}",
            "Use the same model as a diffusers folder",
        )
    left = [name for name in foreign.unused(lone, parts.values()) if not foreign.idle(name)]
    if left:
        log.warning(
            "%s holds %d tensors that no component has a place for, the first is %r", lone.path, len(left), left[0]
        )
    return parts


def _place(seen: detection.Detected, base: detection.Detected) -> str:
    """Which component of the base a lone one replaces: a text encoder that of its kind and sizes, others that with
    their tensor names, or of their kind. For a checkpoint of several, the main one."""
    lone, kind = seen.sources["."], seen.component or ""
    if seen.family in text.KINDS:
        return _text_place(seen, base)
    names = lone.names
    shared = {name: len(src.names & names) / max(len(names), 1) for name, src in base.sources.items()}
    best = max(shared, key=lambda name: shared[name])
    if shared[best] > 0.9:
        return best
    if kind in base.sources:
        return kind
    if kind == "checkpoint":
        return next(name for name in (*detection.MAIN, *base.sources) if name in base.sources)
    raise _no_place(seen, base, f"it is {kind or 'of an unknown kind'}, and the pipeline has {', '.join(base.sources)}")


def _text_place(seen: detection.Detected, base: detection.Detected) -> str:
    """Which of the base's text encoders is of a lone one's kind, width and depth: SDXL and SD3 have two of CLIP."""
    kind, mine = text.KINDS[str(seen.family)], text.sizes(seen.sources["."].tensors)
    alike = {name: text.sizes_of(src.config) for name, src in base.sources.items() if kind in str(src.class_name)}
    fitting = [name for name, sizes in alike.items() if sizes == mine]
    if fitting or len(alike) == 1:  # of the only one, the weights tell in what they do not fit
        return (fitting or list(alike))[0]
    has = " and ".join(f"{name} ({text.told(sizes)})" for name, sizes in alike.items())
    raise _no_place(
        seen,
        base,
        f"it is a {kind} text encoder of {text.told(mine)}, and the pipeline has {has or 'none of that kind'}",
    )


def _no_place(seen: detection.Detected, base: detection.Detected, why: str) -> MissingComponentError:
    return MissingComponentError(
        f"{seen.path} was to take its place in {base.path}", why, "Give the pipeline folder of the same model as base"
    )

"""Which files make up the model that was asked for: those of the path, and of its base."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import detection
from .errors import ConflictError, MissingComponentError, UnsupportedFileError
from .formats import adapters, configs, families, text
from .formats.strays import refuse_strays

if TYPE_CHECKING:
    from .formats.source import Source
    from .request import Request

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"  # the component of a file that holds those of a whole pipeline


def with_base(asked: Request) -> Request:
    """The request with a base, where one is needed and not given: a checkpoint of several models has no configs, no
    tokenizers and no scheduler, and diffusers knows from which repository to take them.

    Raises:
        MissingComponentError: they cannot be had.
    """
    seen = look(asked, complete=False)
    row = families.recognise(seen.sources["."].names) if asked.base is None and "." in seen.sources else None
    if row is None or row.component != CHECKPOINT:
        return asked
    from . import components, hub

    lone = seen.sources["."]
    name = components.reference({key: info.shape for key, info in lone.tensors.items()})
    try:
        folder = hub.hub_folder(name, progress=asked.progress, weights=False)
    except MissingComponentError as error:
        raise MissingComponentError(
            f"{asked.path} was to be loaded",
            f"it is a checkpoint of {seen.family} in the {row.layout} layout, which has neither configs nor "
            f"tokenizers, and those of {name} could not be had: {error.__cause__}".splitlines()[0],
            "Give base=<pipeline folder of the same model> (its weights are not needed), or connect to the hub once",
        ) from error
    return dataclasses.replace(asked, base=str(folder))


def look(asked: Request, *, complete: bool) -> detection.Detected:
    """What the path itself holds. A pipeline that gets parts may lack the weights of some."""
    see = detection.detect_base if asked.parts else detection.detect
    return see(asked.path, complete=complete, allow_pickle=asked.allow_pickle, variant=asked.variant)


def lender(asked: Request, seen: detection.Detected, *, complete: bool) -> detection.Detected | None:
    """The pipeline in which lone files take their places: the base, or the path itself where it gets parts; None where
    there are no lone files, or one alone.

    Raises:
        MissingComponentError: there is no such pipeline, or one too many.
    """
    whole = seen.container == "pipeline"
    if asked.base is None:
        if asked.parts and not whole:
            raise MissingComponentError(
                f"{asked.path} was to be loaded with parts",
                "it is no pipeline folder, and the rest of the pipeline (configs, tokenizers, scheduler) is in no file",
                "Give base=<pipeline folder of the same model> (of what the files hold, its weights are not needed)",
            )
        return seen if asked.parts else None
    base = detection.detect_base(asked.base, complete=complete, allow_pickle=asked.allow_pickle)
    if whole or base.container != "pipeline":
        raise MissingComponentError(
            f"{asked.path} was to be loaded with base={asked.base}",
            "base is for a lone component, and must be a pipeline folder",
            "Leave base out" if whole else "Give the folder with the model_index.json",
        )
    return base


def whole_of(asked: Request, *, complete: bool) -> detection.Detected:
    """What the path holds; with a base or parts, the pipeline's components with the lone ones in their places."""
    seen = _gathered(asked, complete=complete)
    return dataclasses.replace(seen, sources={name: text.tidied(src) for name, src in seen.sources.items()})


def _gathered(asked: Request, *, complete: bool) -> detection.Detected:
    seen = look(asked, complete=complete)
    parts = [detection.detect(path, complete=complete, allow_pickle=asked.allow_pickle) for path in asked.parts]
    for lora in (one for one in (seen, *parts) if one.component == "lora"):
        adapters.refuse(lora.path, lora.sources["."].names)
    if complete:
        for src in (src for one in (seen, *parts) for src in one.sources.values()):
            refuse_strays(src.path, src.plain)
    base = lender(asked, seen, complete=complete)
    if base is None:
        return _with_config(seen) if complete else seen
    lone = [] if seen is base else [seen]
    takes = [_taken(one, base, complete=complete) for one in (*lone, *map(_one_component, parts))]
    _refuse_twice(takes)
    sources = {**base.sources, **{name: src for take in takes for name, src in take.sources.items()}}
    if complete:
        _refuse_missing(asked, sources)
    return detection.joined(base, {take.place: take.seen for take in takes}, sources, path=asked.path)


@dataclasses.dataclass(frozen=True)
class _Take:
    """What a lone file gives to a pipeline.

    Attributes:
        seen: the file. place: the component that it is for; of a checkpoint the main one.
        sources: all components that are made of it.
    """

    seen: detection.Detected
    place: str
    sources: Mapping[str, Source]


def _taken(seen: detection.Detected, base: detection.Detected, *, complete: bool) -> _Take:
    lone = seen.sources["."]
    row = families.recognise(lone.names)
    name = _place(seen, base)
    owner = base.sources[name]
    src = dataclasses.replace(
        lone, config=lone.config or owner.config, library=owner.library, class_name=owner.class_name
    )
    if not complete:
        return _Take(seen, name, {name: src})
    if row is not None and row.foreign:
        return _Take(seen, name, _translated(lone, base, name))
    from . import foreign

    return _Take(seen, name, {name: foreign.with_projection(src)})


def _one_component(part: detection.Detected) -> detection.Detected:
    """A part as it is; MissingComponentError if it is a pipeline, or a checkpoint of several models."""
    if part.container == "pipeline" or part.component == CHECKPOINT:
        raise MissingComponentError(
            f"{part.path} was given as a part",
            f"it is a {'pipeline' if part.container == 'pipeline' else 'checkpoint'} of several components, and a part "
            "takes the place of one",
            "Load it by its own path, with the lone files as parts",
        )
    return part


def _refuse_twice(takes: list[_Take]) -> None:
    """Raise ConflictError if two lone files are for the same component. What else a checkpoint holds gives way."""
    owners: dict[str, _Take] = {}
    for take in takes:
        for name in () if take.seen.component == CHECKPOINT else take.sources:
            if name in owners:
                raise ConflictError(
                    f"{take.seen.path} was given as a part",
                    f"it is the {name} of the pipeline, and so is {owners[name].seen.path}",
                    "Leave one of them out",
                )
            owners[name] = take


def _with_config(seen: detection.Detected) -> detection.Detected:
    """A lone UNet or transformer in a foreign layout under diffusers' names, if its config is beside it or known."""
    lone = seen.sources.get(".")
    row = families.recognise(lone.names) if lone is not None else None
    if lone is None or row is None or not row.foreign or row.component == CHECKPOINT:
        return seen
    from . import foreign

    config = lone.config or configs.known(seen.family, foreign.shapes(lone))
    if not isinstance(config.get("_class_name"), str):
        return seen
    owner = dataclasses.replace(lone, config=config, library="diffusers", class_name=str(config["_class_name"]))
    made = foreign.convert(lone, row.component, owner)
    return seen if made is None else dataclasses.replace(seen, class_name=made.class_name, sources={".": made})


def _refuse_missing(asked: Request, sources: Mapping[str, Source]) -> None:
    """Raise MissingComponentError for components that none of the files and folders has weights for."""
    missing = [name for name, src in sources.items() if src.empty]
    if missing:
        places = ", ".join(str(sources[name].path) for name in missing)
        given = f" with base={asked.base}" if asked.base is not None else ""
        given += f"{' and' if given else ' with'} parts {', '.join(asked.parts)}" if asked.parts else ""
        raise MissingComponentError(
            f"{asked.path} was to be loaded{given}",
            f"{'none' if asked.parts else 'neither'} of them has weights for {' and '.join(missing)}",
            f"Put those of the same model into {places}, give their files as parts=, or give a base that has them",
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
    if kind == CHECKPOINT:
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
        f"{seen.path} was to take its place in {base.path}", why, "Use it with a pipeline folder of the same model"
    )

"""Merge the files of single components into the pipeline that they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import LONE
from ..errors import ConflictError, MissingComponentError, SettingsError, UnsupportedFileError
from ..formats import known_configs, model_families, text_encoders
from ..models import Detected, file_tokenizers, joined, partial_encoders, stray_warnings
from ..utils.suggestions import did_you_mean
from . import component_places as places
from .component_files import ComponentFile
from .component_places import CHECKPOINT

if TYPE_CHECKING:
    from ..formats import Checkpoint
    from .component_files import ModelFiles


def whole_of(
    files: ModelFiles, *, complete: bool, as_floats: Collection[str] = (), dtype: str | None = None
) -> Detected:
    """Return everything to load: the path, or the pipeline with single-component files merged into it.

    Args:
        complete: also check that files are as long as their headers say, check the components against their models, and
            use the models' tensor names (`models.fitting`).
        as_floats: components whose quantized weights are to be dequantized while they are read. dtype: of the floats of
            these, see `models.with_float_weights`.
    """
    detected = merge(files, complete=complete)
    sources = {name: text_encoders.tidied(src) for name, src in detected.sources.items()}
    if as_floats:
        from ..models import with_float_weights

        sources |= {name: with_float_weights(src, dtype) for name, src in sources.items() if name in as_floats}
    if complete:
        from ..models import fitting

        sources = {name: fitting.fitted(src) for name, src in sources.items()}
        lines = [line for src in sources.values() for line in stray_warnings(src.path, src.strays)]
        detected = dataclasses.replace(detected, warnings=[*detected.warnings, *lines])
    return dataclasses.replace(detected, sources=sources)


def merge(files: ModelFiles, *, complete: bool, may_lack: bool = False) -> Detected:
    """Merge the files of single components into the pipeline that has the rest, if there is one.

    Args:
        complete: see `whole_of`. may_lack: components without weights are allowed.
    """
    detected, base = files.detected, files.pipeline
    contents = [detected, *(seen for _, seen in files.parts)]
    if complete:
        for one in (*contents, *([] if base is None or base is detected else [base])):
            for src in one.sources.values():
                src.refuse_other_lengths()
    if base is None:
        return _with_config(detected) if complete else detected
    lone = [] if detected is base else [(detected, files.place)]
    assigned = [*lone, *((_one_component(seen), one.component) for one, seen in files.parts)]
    names = _places(assigned, base)
    takes = [_taken(one, name, base, complete=complete) for (one, _), name in zip(assigned, names, strict=True)]
    _refuse_twice(takes, base)
    sources = {**base.sources, **{name: src for take in takes for name, src in take.sources.items()}}
    if complete and not may_lack:
        _refuse_missing(files, sources)
    merged = joined(base, {take.place: take.seen for take in takes}, sources, path=files.path)
    warnings = [*merged.warnings, *_chosen_by_name(assigned, names, base)]
    if complete and not may_lack:
        warnings += file_tokenizers.require(Path(base.path), sources)
    return dataclasses.replace(merged, warnings=warnings)


@dataclasses.dataclass(frozen=True)
class _Take:
    """The components of a pipeline that a file replaces.

    Attributes:
        seen: the file. place: the component that it replaces; the main one for an all-in-one checkpoint.
        sources: all components that come from the file.
    """

    seen: Detected
    place: str
    sources: Mapping[str, Checkpoint]


def _taken(detected: Detected, name: str, base: Detected, *, complete: bool) -> _Take:
    lone = partial_encoders.with_vision_of(detected.sources[LONE], base.sources[name])
    row = model_families.recognise(lone.names)
    owner, remarks = partial_encoders.owner_for(lone, base.sources[name])
    vision = [] if lone is detected.sources[LONE] else [f"its vision is that of {base.sources[name].path}"]
    detected = dataclasses.replace(
        detected, evidence=[*detected.evidence, *vision], warnings=[*detected.warnings, *remarks]
    )
    src = dataclasses.replace(
        lone, config=lone.config or owner.config, library=owner.library, class_name=owner.class_name
    )
    if not complete:
        return _Take(detected, name, {name: src})
    from ..models import convert

    if row is not None and row.foreign:
        parts = _translated(lone, base, name)
        return _Take(_with_leftovers(detected, lone, parts.values()), name, parts)
    return _Take(detected, name, {name: partial_encoders.with_norm(convert.with_projection(src))})


def _with_leftovers(detected: Detected, lone: Checkpoint, parts: Collection[Checkpoint]) -> Detected:
    """Return what was detected in a file, with a warning about tensors that none of its converted components uses."""
    from ..models import convert

    left = [name for name in convert.unused_keys(lone, parts) if not convert.idle(name)]
    lines = stray_warnings(lone.path, left, "its model")
    return dataclasses.replace(detected, warnings=[*detected.warnings, *lines])


def _one_component(part: Detected) -> Detected:
    """Return the part unchanged; raise MissingComponentError for pipelines and all-in-one checkpoints."""
    if part.container == "pipeline" or part.component == CHECKPOINT:
        raise MissingComponentError(
            f"Cannot use {part.path} as a part",
            f"it is a {'pipeline' if part.container == 'pipeline' else 'checkpoint'} of several components, and a part "
            "replaces one component",
            "Load it by its own path, with the files of single components as parts",
        )
    return part


def _refuse_twice(takes: list[_Take], base: Detected) -> None:
    """Raise ConflictError if two files are for the same component. Components of a checkpoint give way to others."""
    owners: dict[str, _Take] = {}
    for take in takes:
        for name in () if take.seen.component == CHECKPOINT else take.sources:
            if name in owners:
                pair = [owners[name].seen.path, take.seen.path]
                free = [one for one in places.places_for(take.seen, base) if one != name]
                raise ConflictError(
                    f"Cannot put both {pair[0]} and {pair[1]} into {base.path}",
                    f"both are its {name}",
                    f"Say which one is which, as in parts={_spelled(dict(zip([name, free[0]], pair, strict=True)))}"
                    if free
                    else "Remove one of them",
                )
            owners[name] = take


def _with_config(detected: Detected) -> Detected:
    """Convert a single UNet or transformer in a foreign layout to diffusers' names, if its config is known."""
    lone = detected.sources.get(LONE)
    row = model_families.recognise(lone.names) if lone is not None else None
    if lone is None or row is None or not row.foreign or row.component == CHECKPOINT:
        return detected
    from ..models import convert

    config = lone.config or known_configs.known(detected.family, convert.shapes(lone))
    if not isinstance(config.get("_class_name"), str):
        return detected
    owner = dataclasses.replace(lone, config=config, library="diffusers", class_name=str(config["_class_name"]))
    converted = convert.convert(lone, row.component, owner)
    if converted is None:
        return detected
    detected = _with_leftovers(detected, lone, [converted])
    return dataclasses.replace(detected, class_name=converted.class_name, sources={LONE: converted})


def _refuse_missing(files: ModelFiles, sources: Mapping[str, Checkpoint]) -> None:
    """Raise MissingComponentError for components without weights in any of the files and folders."""
    missing = [name for name, src in sources.items() if src.is_empty]
    if missing:
        places = ", ".join(str(sources[name].path) for name in missing)
        parts = [*([ComponentFile(files.path, files.place)] if files.place else []), *(one for one, _ in files.parts)]
        options = f" with base={files.base}" if files.base is not None else ""
        options += f"{' and' if options else ' with'} parts {', '.join(map(str, parts))}" if parts else ""
        raise MissingComponentError(
            f"Cannot load {files.path}{options}",
            f"{'none' if parts else 'neither'} of them has weights for {' and '.join(missing)}",
            f"Put the weights of the same model into {places}, pass their files as parts=, or use a base that has them",
        )


def _translated(lone: Checkpoint, base: Detected, main: str) -> dict[str, Checkpoint]:
    """Convert the components of a file in a foreign layout to the base's names: the main one (a UNet or transformer)
    and any others in the file."""
    from ..models import convert

    row = model_families.recognise(lone.names)
    alone = row is not None and row.component == "text_encoder"  # with nothing beside it
    owners = {
        name: src for name, src in base.sources.items() if name == main or (not alone and convert.beside(name, src))
    }
    converted = {name: convert.convert(lone, name, owner) for name, owner in owners.items()}
    parts = {name: src for name, src in converted.items() if src is not None}
    if not parts:
        raise UnsupportedFileError(
            f"Cannot use {lone.path} in {base.path}",
            f"diffusers has no key map from its layout to {owners[main].class_name}",
            "Use the same model as a diffusers folder",
        )
    return parts


_Wanted = Sequence[tuple[Detected, str | None]]  # files, each with the component that the user assigned it to


def _places(files: _Wanted, base: Detected) -> list[str]:
    """Return the component of the base that each file replaces: the one that the user assigned, the only one that it
    fits, the one that its name indicates, or the only one that the other files leave.

    Raises:
        MissingComponentError: it fits none, or several and nothing tells which. ConflictError: it does not fit the
            assigned one. SettingsError: there is no component of that name.
    """
    fitting = [places.places_for(detected, base) for detected, _ in files]
    slots = [
        _named(detected, name, base) if name is not None else _sure(detected, names, base)
        for (detected, name), names in zip(files, fitting, strict=True)
    ]
    for index, (detected, _) in enumerate(files):
        if slots[index] is None:
            left = [name for name in fitting[index] if name not in slots]
            slots[index] = left[0] if len(left) == 1 else None
            if slots[index] is None:
                raise _not_told(detected, fitting[index], base)
    return [str(name) for name in slots]


def _named(detected: Detected, name: str, base: Detected) -> str:
    """Return the component that the user assigned a file to, after checking that it exists and may fit."""
    if name not in base.sources:
        raise SettingsError(
            f"Cannot use {detected.path} as {name!r}",
            f"{base.path} has {', '.join(base.sources)}",
            did_you_mean(name, base.sources, "Name one of these"),
        )
    why = places.misfit(detected, name, base)
    if why is not None:
        names = places.places_for(detected, base)
        raise ConflictError(
            f"Cannot use {detected.path} as the {name} of {base.path}",
            why,
            f"Use parts={_spelled({names[0]: detected.path})}" if names else "Give a file of the same model",
        )
    return name


def _sure(detected: Detected, names: Sequence[str], base: Detected) -> str | None:
    """Return the only component that a file fits, or the one of several that its name indicates; None if unclear."""
    if not names:
        raise _no_place(detected, base)
    return names[0] if len(names) == 1 else places.hinted(detected.path, names)


def _not_told(detected: Detected, names: Sequence[str], base: Detected) -> MissingComponentError:
    """Return the error for a file that fits several components, none of which its name indicates."""
    each = " or ".join(f"parts={_spelled({name: detected.path})}" for name in names)
    return MissingComponentError(
        f"Cannot tell which component of {base.path} the file {detected.path} is",
        f"it fits {' and '.join(names)}, and its name indicates neither" if len(names) == 2
        else f"it fits {', '.join(names)}, and its name indicates none of them",
        f"Say which one, with {each} (on the command line --part {names[-1]}=FILE)",
    )  # fmt: skip


def _spelled(parts: Mapping[str, str]) -> str:
    """Return the source text of a mapping of parts."""
    return "{" + ", ".join(f'"{name}": "{path}"' for name, path in parts.items()) + "}"


def _chosen_by_name(files: _Wanted, slots: Sequence[str], base: Detected) -> list[str]:
    """Return a warning for each file whose component was guessed from its name while the base keeps the other one."""
    lines = []
    for (detected, name), place in zip(files, slots, strict=True):
        others = [one for one in places.places_for(detected, base) if one not in slots]
        if name is None and others:
            remaining = " and ".join(others)
            verb = "is" if len(others) == 1 else "are"
            lines.append(
                f"{detected.path} is used as {place} because of its name; {remaining} {verb} taken from {base.path}"
            )
    return lines


def _no_place(detected: Detected, base: Detected) -> MissingComponentError:
    """Return the error for a file that fits no component of a pipeline."""
    has = ", ".join(base.sources)
    if detected.family in text_encoders.KINDS:
        kind = text_encoders.KINDS[str(detected.family)].title
        mine = text_encoders.sizes(detected.sources[LONE].tensors)
        alike = places.text_encoders(detected, base).items()
        has = (
            " and ".join(f"{name} ({text_encoders.describe_encoder(sizes)})" for name, sizes in alike)
            or "none of that kind"
        )
        what = f"a {kind} text encoder of {text_encoders.describe_encoder(mine)}"
    elif detected.class_name is not None and detected.component in base.sources:  # of another class
        what, owner = f"a {detected.class_name}", base.sources[str(detected.component)]
        has = f"{owner.class_name} as its {detected.component}"
    else:
        what = f"of kind {detected.component!r}" if detected.component else "of a kind that sdquant does not know"
    return MissingComponentError(
        f"Cannot use {detected.path} with {base.path}",
        f"it is {what}, but the pipeline has {has}",
        "Use a file that was made for this model, or the pipeline folder that this file was made for"
        + (
            ""
            if detected.component
            else f". If you know which component it is, pass parts={_spelled({'NAME': detected.path})}"
        ),
    )

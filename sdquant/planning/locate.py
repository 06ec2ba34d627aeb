"""Find the files of a requested model, on disk or on the hub, and read the header of each once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import LONE
from ..errors import MissingComponentError, SdquantError, SettingsError
from ..formats import component_configs, model_families, refused_files
from ..models import Reference, detection, gguf_encoders, hub_references
from ..utils.home_paths import with_home
from . import vision_files
from .component_files import ModelFiles
from .component_places import CHECKPOINT
from .component_sources import merge

if TYPE_CHECKING:
    from ..formats import Given
    from ..models import Detected
    from .component_files import ComponentFile
    from .request import Request


def locate(request: Request) -> ModelFiles:
    """Return the files of a request; those on the hub are downloaded as far as they will be loaded.

    Raises:
        MissingComponentError, UnsupportedFileError: there is no such file, or no pipeline that has the rest.
        SettingsError: revision or subfolder for a path that has none.
    """
    parts = tuple(dataclasses.replace(one, path=str(_fetch(_parse(one.path), request, True))) for one in request.parts)
    lends_itself = bool(parts) and request.base is None
    place = _place(request)
    path = str(_fetch(place, request, () if lends_itself else True, request.variant))
    files = _with_parts(path, parts, request)
    if request.base is not None:
        return _with_base(files, _parse(request.base), request)
    if files.detected.container != "pipeline":
        if _is_checkpoint(files.detected):
            return _with_known_base(files, request)
        if lends_itself:
            raise _no_pipeline(path)
        return files
    if not lends_itself:
        return files
    files = dataclasses.replace(files, pipeline=files.detected)
    lacking = _lacking(files) if isinstance(place, Reference) else []
    if lacking:
        folder = str(_fetch(place, request, lacking, request.variant))
        whole = _read(folder, request, partial=True, variant=request.variant)
        files = dataclasses.replace(files, detected=whole, pipeline=whole)
    return files


def resolve_references(request: Request) -> Path:
    """Return the file or folder of a request's path, downloaded if it is on the hub."""
    return _fetch(_place(request), request, True, request.variant)


def _with_parts(path: str, parts: tuple[ComponentFile, ...], request: Request) -> ModelFiles:
    """Detect the model's own file or folder, and those of its parts."""
    detected = _read(path, request, partial=bool(parts), variant=request.variant, config=request.config)
    own = [one for one in parts if one.component is not None and _is_same_file(one.path, path)]
    others = [one for one in parts if one not in own[:1]]
    contents = [_read(one.path, request, is_component=True) for one in others]
    visions = [one for one in contents if one.component == gguf_encoders.VISION]
    if visions:
        detected, *contents = vision_files.with_visions([detected, *contents], visions)
        kept = [pair for pair in zip(others, contents, strict=True) if pair[1].component != gguf_encoders.VISION]
        others, contents = [one for one, _ in kept], [seen for _, seen in kept]
    for lora in (one for one in (detected, *contents) if one.component == "lora"):
        refused_files.refuse_lora(lora.path, lora.sources[LONE].names)
    return ModelFiles(
        path=path,
        base=None,
        detected=detected,
        place=own[0].component if own else None,
        parts=tuple(zip(others, contents, strict=True)),
    )


def _with_base(files: ModelFiles, place: Path | Reference, request: Request) -> ModelFiles:
    """Return the files merged into a base; of one on the hub only those weights are downloaded that they lack."""
    if isinstance(place, Path):
        return _merged(files, str(place), request)
    placed = _merged(files, str(_fetch(place, request, ())), request)
    lacking = _lacking(placed)
    return _merged(files, str(_fetch(place, request, lacking)), request) if lacking else placed


def _with_known_base(files: ModelFiles, request: Request) -> ModelFiles:
    """Return an all-in-one checkpoint merged into the pipeline that diffusers knows for it: the file has no configs,
    tokenizers or scheduler.

    Raises:
        MissingComponentError: they cannot be downloaded.
    """
    from ..models import components, hub

    lone = files.detected.sources[LONE]
    row = model_families.recognise(lone.names)
    name = components.reference({key: info.shape for key, info in lone.tensors.items()})
    try:
        folder = hub.fetch(Reference(name), progress=request.progress, weights=False, token=request.token)
    except MissingComponentError as error:
        layout = "unknown" if row is None else row.layout
        raise MissingComponentError(
            f"Cannot load {files.path}",
            f"it is a {files.detected.family} checkpoint in the {layout} layout, which contains neither configs nor "
            f"tokenizers, and those of {name} could not be downloaded: {error.__cause__}".splitlines()[0],
            "Give base=<pipeline folder of the same model> (its weights are not needed), or connect to the hub once",
        ) from error
    return _merged(files, str(folder), request)


def _merged(files: ModelFiles, base: str, request: Request) -> ModelFiles:
    """Return the files with a base, whose headers are read."""
    pipeline = _read(base, request, partial=True)
    whole = files.detected.container == "pipeline"
    if whole or pipeline.container != "pipeline":
        raise MissingComponentError(
            f"Cannot load {files.path} with base={base}",
            "base is for a single component and must be a pipeline folder",
            "Remove base" if whole else "Give the folder with the model_index.json",
        )
    return dataclasses.replace(files, base=base, pipeline=pipeline)


def _lacking(files: ModelFiles) -> list[str]:
    """Return the components whose weights have to come from the pipeline folder, since no file contains them."""
    sources = merge(files, complete=True, may_lack=True).sources
    return [name for name, src in sources.items() if src.is_empty]


def _read(
    path: str,
    request: Request,
    *,
    variant: str | None = None,
    partial: bool = False,
    is_component: bool = False,
    config: Given | None = None,
) -> Detected:
    """Read the headers of what a path contains; see `read_headers`."""
    try:
        return detection.read_headers(
            path, complete=False, allow_pickle=request.allow_pickle, variant=variant, partial=partial,
            is_component=is_component, config=config,
        )  # fmt: skip
    except SdquantError as error:
        if is_component:  # config= is for the model's own file, and a part's says it by one beside it
            raise type(error)(error.what, error.why, component_configs.in_words_of_files(error.fix)) from error
        raise


def _is_checkpoint(detected: Detected) -> bool:
    """Return whether it is a single file with the components of a whole pipeline."""
    row = model_families.recognise(detected.sources[LONE].names) if LONE in detected.sources else None
    return row is not None and row.component == CHECKPOINT


def _no_pipeline(path: str) -> MissingComponentError:
    return MissingComponentError(
        f"Cannot load {path} with parts",
        "it is not a pipeline folder, and none of the files contains the rest of the pipeline (configs, tokenizers, "
        "scheduler)",
        "Give base=<pipeline folder of the same model> (it needs no weights for components in these files)",
    )


def _is_same_file(one: str, other: str) -> bool:
    return os.path.realpath(with_home(one)) == os.path.realpath(with_home(other))


def _place(request: Request) -> Path | Reference:
    """Parse the request's path, revision and subfolder into a local path or a hub reference."""
    what = _parse(request.path)
    if isinstance(what, Path):
        if request.revision is not None:
            raise SettingsError(
                f"Cannot use revision={request.revision!r} for {request.path}", "it is a local path", "Remove revision"
            )
        if request.subfolder is not None and what.is_file():
            raise SettingsError(
                f"Cannot use subfolder={request.subfolder!r} for {request.path}", "it is a file", "Remove subfolder"
            )
        return what if request.subfolder is None else what / request.subfolder
    if request.revision is not None:
        if what.revision not in (None, request.revision):
            raise SettingsError(
                f"Cannot use revision={request.revision!r} for {request.path}",
                f"the path already specifies revision {what.revision}",
                "Remove one of the two",
            )
        what = dataclasses.replace(what, revision=request.revision)
    if request.subfolder is None:
        return what
    return dataclasses.replace(what, inside="/".join(filter(None, (request.subfolder.strip("/"), what.inside))))


def _parse(text: str) -> Path | Reference:
    # os.path's functions return False where Path's raise: a name that is too long, a user that does not exist.
    place = Path(with_home(text))
    if os.path.exists(place):
        return place
    return hub_references.reference(text) or place


def _fetch(
    what: Path | Reference, request: Request, weights: bool | Collection[str], variant: str | None = None
) -> Path:
    """Return the local file or folder, downloaded if it is on the hub; `weights` and `variant`: see `hub.fetch`."""
    from ..models import hub

    if isinstance(what, Path):
        return what
    return hub.fetch(what, progress=request.progress, weights=weights, variant=variant, token=request.token)

"""Resolve the paths of a request to local files; files on the hub are downloaded as far as they will be loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingsError
from ..models.hub_references import Reference, reference
from . import component_sources

if TYPE_CHECKING:
    from .request import Request


def fetched(request: Request) -> Request:
    """Return the request with local paths of the model, its base and its parts.

    If files of single components are merged into a pipeline on the hub, weights are downloaded only for the others.

    Raises:
        MissingComponentError, UnsupportedFileError: as `hub.fetch`. SettingsError: revision or subfolder for a path
            that has none.
    """
    parts = tuple(dataclasses.replace(one, path=str(_place(one.path, request))) for one in request.parts)
    request = dataclasses.replace(request, parts=parts)
    lends_itself = bool(parts) and request.base is None
    path, base = _of_path(request), None if request.base is None else _of(request.base)
    if isinstance(path, Reference):
        path = _fetch(path, request, () if lends_itself else True, request.variant)
    placed = dataclasses.replace(request, path=str(path))
    if isinstance(base, Reference):
        configs = dataclasses.replace(placed, base=str(_fetch(base, request, ())))
        base = _fetch(base, request, component_sources.lacking(configs))
    elif lends_itself and isinstance(what := _of_path(request), Reference):
        path = _fetch(what, request, component_sources.lacking(placed), request.variant)
    return dataclasses.replace(placed, path=str(path), base=None if base is None else str(base))


def resolve_references(request: Request) -> Path:
    """Return the file or folder of a request's path, downloaded if it is on the hub."""
    what = _of_path(request)
    return _fetch(what, request, True, request.variant) if isinstance(what, Reference) else what


def _of_path(request: Request) -> Path | Reference:
    """Parse the request's path, revision and subfolder into a local path or a hub reference."""
    what = _of(request.path)
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


def _of(text: str) -> Path | Reference:
    # os.path's functions return False where Path's raise: a name that is too long, a user that does not exist.
    place = Path(os.path.expanduser(text))
    if os.path.exists(place):
        return place
    return reference(text) or place


def _place(text: str, request: Request) -> Path:
    """Return a part's local file or folder."""
    what = _of(text)
    return _fetch(what, request, True) if isinstance(what, Reference) else what


def _fetch(what: Reference, request: Request, weights: bool | Collection[str], variant: str | None = None) -> Path:
    from ..models import hub

    return hub.fetch(what, progress=request.progress, weights=weights, variant=variant, token=request.token)

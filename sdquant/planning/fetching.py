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


def fetched(asked: Request) -> Request:
    """Return the request with local paths of the model, its base and its parts.

    If files of single components are merged into a pipeline on the hub, weights are downloaded only for the others.

    Raises:
        MissingComponentError, UnsupportedFileError: as `hub.fetch`. SettingsError: revision or subfolder for a path
            that has none.
    """
    parts = tuple(dataclasses.replace(one, path=str(_place(one.path, asked))) for one in asked.parts)
    asked = dataclasses.replace(asked, parts=parts)
    lends_itself = bool(parts) and asked.base is None
    path, base = _of_path(asked), None if asked.base is None else _of(asked.base)
    if isinstance(path, Reference):
        path = _fetch(path, asked, () if lends_itself else True, asked.variant)
    placed = dataclasses.replace(asked, path=str(path))
    if isinstance(base, Reference):
        configs = dataclasses.replace(placed, base=str(_fetch(base, asked, ())))
        base = _fetch(base, asked, component_sources.lacking(configs))
    elif lends_itself and isinstance(what := _of_path(asked), Reference):
        path = _fetch(what, asked, component_sources.lacking(placed), asked.variant)
    return dataclasses.replace(placed, path=str(path), base=None if base is None else str(base))


def resolve(asked: Request) -> Path:
    """Return the file or folder of a request's path, downloaded if it is on the hub."""
    what = _of_path(asked)
    return _fetch(what, asked, True, asked.variant) if isinstance(what, Reference) else what


def _of_path(asked: Request) -> Path | Reference:
    """Parse the request's path, revision and subfolder into a local path or a hub reference."""
    what = _of(asked.path)
    if isinstance(what, Path):
        if asked.revision is not None:
            raise SettingsError(
                f"Cannot use revision={asked.revision!r} for {asked.path}", "it is a local path", "Remove revision"
            )
        if asked.subfolder is not None and what.is_file():
            raise SettingsError(
                f"Cannot use subfolder={asked.subfolder!r} for {asked.path}", "it is a file", "Remove subfolder"
            )
        return what if asked.subfolder is None else what / asked.subfolder
    if asked.revision is not None:
        if what.revision not in (None, asked.revision):
            raise SettingsError(
                f"Cannot use revision={asked.revision!r} for {asked.path}",
                f"the path already specifies revision {what.revision}",
                "Remove one of the two",
            )
        what = dataclasses.replace(what, revision=asked.revision)
    if asked.subfolder is None:
        return what
    return dataclasses.replace(what, inside="/".join(filter(None, (asked.subfolder.strip("/"), what.inside))))


def _of(text: str) -> Path | Reference:
    # os.path's functions return False where Path's raise: a name that is too long, a user that does not exist.
    place = Path(os.path.expanduser(text))
    if os.path.exists(place):
        return place
    return reference(text) or place


def _place(text: str, asked: Request) -> Path:
    """Return a part's local file or folder."""
    what = _of(text)
    return _fetch(what, asked, True) if isinstance(what, Reference) else what


def _fetch(what: Reference, asked: Request, weights: bool | Collection[str], variant: str | None = None) -> Path:
    from ..models import hub

    return hub.fetch(what, progress=asked.progress, weights=weights, variant=variant, token=asked.token)

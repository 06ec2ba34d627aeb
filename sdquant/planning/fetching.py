"""From what a request names to files on this machine: what is on the hub is downloaded, as far as it will be loaded."""

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
    """The request with paths on this machine: of the model, its base and its parts.

    Of a pipeline on the hub that lends what lone files lack, only those components' weights are downloaded.

    Raises:
        MissingComponentError, UnsupportedFileError: as `hub.fetch`. SettingsError: revision or subfolder for what has
            none.
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
    """The file or folder of a request's path, downloaded if it is on the hub."""
    what = _of_path(asked)
    return _fetch(what, asked, True, asked.variant) if isinstance(what, Reference) else what


def _of_path(asked: Request) -> Path | Reference:
    """What the path names, at its revision and with its subfolder."""
    what = _of(asked.path)
    if isinstance(what, Path):
        if asked.revision is not None:
            raise SettingsError(
                f"revision={asked.revision!r} was given for {asked.path}", "it is on this machine", "Leave revision out"
            )
        if asked.subfolder is not None and what.is_file():
            raise SettingsError(
                f"subfolder={asked.subfolder!r} was given for {asked.path}", "it is a file", "Leave subfolder out"
            )
        return what if asked.subfolder is None else what / asked.subfolder
    if asked.revision is not None:
        if what.revision not in (None, asked.revision):
            raise SettingsError(
                f"revision={asked.revision!r} was given for {asked.path}",
                f"the path says revision {what.revision}",
                "Leave one of the two out",
            )
        what = dataclasses.replace(what, revision=asked.revision)
    if asked.subfolder is None:
        return what
    return dataclasses.replace(what, inside="/".join(filter(None, (asked.subfolder.strip("/"), what.inside))))


def _of(text: str) -> Path | Reference:
    # os.path's functions say no where Path's raise: a name that is too long, a user that does not exist.
    place = Path(os.path.expanduser(text))
    if os.path.exists(place):
        return place
    return reference(text) or place


def _place(text: str, asked: Request) -> Path:
    """A part's file or folder."""
    what = _of(text)
    return _fetch(what, asked, True) if isinstance(what, Reference) else what


def _fetch(what: Reference, asked: Request, weights: bool | Collection[str], variant: str | None = None) -> Path:
    from ..models import hub

    return hub.fetch(what, progress=asked.progress, weights=weights, variant=variant, token=asked.token)

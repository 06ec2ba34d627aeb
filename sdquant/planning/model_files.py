"""The files of a requested model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..models.detection import Detected
    from .component_files import ComponentFile


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """The local files of a requested model, with the contents that their headers show.

    Attributes:
        path: the model's file or folder. base: the folder of the pipeline that has the rest, if there is one.
        detected: the contents of `path`.
        place: the component that a part assigns to `path` itself, by naming the same file.
        parts: the other files of single components, each with its contents.
        pipeline: what single components are merged into: the base, or `path` itself if it is a pipeline and there are
            parts. None if there is nothing to merge.
    """

    path: str
    base: str | None
    detected: Detected
    place: str | None = None
    parts: tuple[tuple[ComponentFile, Detected], ...] = ()
    pipeline: Detected | None = None

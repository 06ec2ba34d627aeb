"""The files of a requested model. `parts=`: files of single components, each with its component's name if given."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..utils.home_paths import with_home

if TYPE_CHECKING:
    from ..models import Detected

# "transformer_2=low.gguf". A file whose own name begins so is written with its folder: "./unet=a.gguf".
_NAMED = re.compile(r"([A-Za-z_]\w*)=(.+)", re.DOTALL)
_FIX = 'Use for example parts=["ae.safetensors"] or parts={"transformer_2": "low_noise.gguf"}'


@dataclass(frozen=True)
class ComponentFile:
    """A file or folder of one component.

    Attributes:
        component: the pipeline component that it replaces; None to pick the one that it fits.
    """

    path: str
    component: str | None = None

    def __str__(self) -> str:
        """Return the text form used by `--part` and config files, which `parts_of` parses."""
        if self.component is not None:
            return f"{self.component}={self.path}"
        return os.path.join(".", self.path) if _NAMED.fullmatch(self.path) else self.path


def parts_of(value: Any) -> Any:
    """Convert a path, "component=path", a list of these, or a mapping of component to path to a tuple of parts.

    Anything else is returned unchanged, for `require_parts` to refuse.
    """
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return tuple(ComponentFile(expanded_path(path), name) for name, path in value.items())
    if isinstance(value, (str, os.PathLike, ComponentFile)):
        value = (value,)
    return tuple(map(_part, value)) if isinstance(value, (list, tuple, set, frozenset)) else value


def require_parts(value: object) -> None:
    """Raise SettingsError unless `value` is a tuple of parts, at most one for each component."""
    if not isinstance(value, tuple) or not all(_is_sound(one) for one in value):
        shown = [str(one) if _is_sound(one) else one for one in value] if isinstance(value, tuple) else value
        why = "parts must be a list of files or a mapping of components to files"
        raise SettingsError(f"Invalid parts={shown!r}", why, _FIX)
    files: dict[str, str] = {}
    for one in value:
        if one.component in files:
            raise SettingsError(
                f"Cannot use both {files[one.component]} and {one.path} as {one.component}",
                "a pipeline has only one component of each name",
                "Remove one of them, or assign it to another component",
            )
        if one.component is not None:
            files[one.component] = one.path


def _part(value: Any) -> Any:
    """Convert one list entry to a Part. Path objects are never split at "="."""
    if isinstance(value, str) and (match := _NAMED.fullmatch(value)):
        return ComponentFile(expanded_path(match[2]), match[1])
    return ComponentFile(expanded_path(value)) if isinstance(value, (str, os.PathLike)) else value


def expanded_path(value: Any) -> Any:
    """Return a path as text, with "~" expanded; any other value as it is, to be refused later."""
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return with_home(value) if isinstance(value, str) else value


def _is_sound(value: object) -> bool:
    if not isinstance(value, ComponentFile) or not isinstance(value.path, str) or not value.path.strip():
        return False
    return value.component is None or (isinstance(value.component, str) and bool(value.component.strip()))


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

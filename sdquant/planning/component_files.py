"""`parts=`: files of single components, each with the component that it is for, where the user says it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SettingsError

# "transformer_2=low.gguf". A file whose own name begins so is written with its folder: "./unet=a.gguf".
_NAMED = re.compile(r"([A-Za-z_]\w*)=(.+)", re.DOTALL)
_FIX = 'Use parts=["ae.safetensors"] or parts={"transformer_2": "low_noise.gguf"}, say'


@dataclass(frozen=True)
class Part:
    """A file or folder of one component.

    Attributes:
        component: the component of the pipeline that it is for; None for that which it fits.
    """

    path: str
    component: str | None = None

    def __str__(self) -> str:
        """As `--part` and config files have it; `parts_of` reads it back."""
        if self.component is not None:
            return f"{self.component}={self.path}"
        return os.path.join(".", self.path) if _NAMED.fullmatch(self.path) else self.path


def parts_of(value: Any) -> Any:
    """The parts in what callers write: a path, "component=path", a list of these, or a mapping of component to path.
    What is none of these is returned as it is, for `require_parts` to refuse."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return tuple(Part(_path(path), name) for name, path in value.items())
    if isinstance(value, (str, os.PathLike, Part)):
        value = (value,)
    return tuple(map(_part, value)) if isinstance(value, (list, tuple, set, frozenset)) else value


def require_parts(value: object) -> None:
    """Raise SettingsError unless `value` is a tuple of parts, at most one for each component."""
    if not isinstance(value, tuple) or not all(_is_sound(one) for one in value):
        shown = [str(one) if _is_sound(one) else one for one in value] if isinstance(value, tuple) else value
        why = "parts is a list of files, or a mapping of components to files"
        raise SettingsError(f"parts={shown!r} was given", why, _FIX)
    files: dict[str, str] = {}
    for one in value:
        if one.component in files:
            raise SettingsError(
                f"{files[one.component]} and {one.path} were given as {one.component}",
                "a pipeline has one component of a name",
                "Leave one of them out, or name another component for it",
            )
        if one.component is not None:
            files[one.component] = one.path


def _part(value: Any) -> Any:
    """A Part of one entry of a list. The text of a path object is never split."""
    if isinstance(value, str) and (match := _NAMED.fullmatch(value)):
        return Part(_path(match[2]), match[1])
    return Part(_path(value)) if isinstance(value, (str, os.PathLike)) else value


def _path(value: Any) -> Any:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return os.path.expanduser(value) if isinstance(value, str) else value


def _is_sound(value: object) -> bool:
    if not isinstance(value, Part) or not isinstance(value.path, str) or not value.path.strip():
        return False
    return value.component is None or (isinstance(value.component, str) and bool(value.component.strip()))

"""Replaces functions of a host while the extension is loaded, and restores them when it is unloaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import SdquantError, SettingsError


@dataclass(frozen=True, kw_only=True)
class _Patch:
    owner: Any
    name: str
    original: Callable[..., Any]
    ours: Callable[..., Any]


class Patches:
    """The replaced functions; `undo` restores them.

    Args:
        tell: called with errors of sdquant before they propagate to the host, which may not show them in full.
    """

    def __init__(self, tell: Callable[[SdquantError], object]) -> None:
        self._tell = tell
        self._patches: list[_Patch] = []
        self._undo: list[Callable[[], object]] = []
        self.active = True

    def require(self, owner: Any, name: str) -> Any:
        """Return a function or class of the host.

        Raises:
            SettingsError: this version of the host, or a fork of it, has none.
        """
        original = getattr(owner, name, None)
        if not callable(original):  # a fork may call a module, or anything else, by this name
            lacks = "has no" if original is None else "has another thing as"
            raise SettingsError(
                "Cannot load sdquant's extension",
                f"this version of the web UI {lacks} {owner.__name__}.{name}, which the extension hooks into",
                "Update the web UI, or remove the extension: sdquant install-extension <its folder> --remove",
            )
        return original

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Make `owner.name` call `around(original, *args, **kwargs)` instead.

        Another extension may wrap this function in turn and call it after `undo`: it then calls only the original.

        Raises:
            SettingsError: this version of the host, or a fork of it, has no such function.
        """
        original = self.require(owner, name)

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            try:
                return around(original, *args, **kwargs)
            except SdquantError as error:
                self._tell(error)
                raise

        self._patches.append(_Patch(owner=owner, name=name, original=original, ours=ours))
        setattr(owner, name, ours)

    def later(self, undo: Callable[[], object]) -> None:
        """Make `undo` call this, too."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Restore everything, in reverse order. A wrapper that others have wrapped since stays, but does nothing."""
        self.active = False
        for row in reversed(self._patches):
            if getattr(row.owner, row.name, None) is row.ours:
                setattr(row.owner, row.name, row.original)
        for undo in reversed(self._undo):
            undo()
        self._patches.clear()
        self._undo.clear()

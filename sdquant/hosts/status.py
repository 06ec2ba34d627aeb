"""Status of the last load, shown in the extension's tab and by its REST route."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..utils.version import __version__

if TYPE_CHECKING:
    from ..errors import SdquantError
    from .host import Host


@dataclass(frozen=True, kw_only=True)
class ComponentStatus:
    """Status of one component: its scheme (None: not quantized), how it was quantized, and its size in bytes."""

    component: str
    scheme: str | None
    how: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Status of one load. `model`: name of the file or folder. `found`: its contents. `error`: text if it failed."""

    model: str | None = None
    found: str | None = None
    parts: Mapping[str, ComponentStatus] = field(default_factory=dict)
    error: str | None = None


class Status:
    """Status of the last load, shared by several threads.

    Args:
        clean: removes paths from a sentence.
    """

    def __init__(self, host: Host, clean: Callable[[str], str]) -> None:
        self.host, self._clean = host, clean
        self._seen = Seen()
        self._lock = threading.Lock()

    @property
    def seen(self) -> Seen:
        """Return the status of the last load."""
        return self._seen

    def begin(self, model: str | None, contents: str | None = None) -> None:
        """Begin a load. `contents`: those of the file, according to the file's headers."""
        with self._lock:
            self._seen = Seen(model=model, found=contents)

    def loaded(self, part: ComponentStatus) -> None:
        """Add a loaded component. Ignored after a failure: the host goes on for a while before it unloads the model."""
        with self._lock:
            if self._seen.error is None:
                self._seen = replace(self._seen, parts={**self._seen.parts, part.component: part})

    def failed(self, error: SdquantError) -> None:
        """Record that the load was refused or failed."""
        with self._lock:
            self._seen = replace(self._seen, parts={}, error=self._clean(str(error)))

    def refused(self, error: SdquantError) -> None:
        """Record that a load was refused before it began: the previous model stays loaded."""
        with self._lock:
            self._seen = replace(self._seen, error=self._clean(str(error)))

    def to_dict(self) -> dict[str, Any]:
        """Return the status as JSON values, without paths: anyone who can reach the web UI can read it."""
        last_load = self._seen
        return {
            "sdquant": __version__,
            "host": self.host.name,
            "title": self.host.title,
            "can": list(self.host.can),
            "cannot": list(self.host.cannot),
            "decided by the host": dict(self.host.theirs),
            "model": last_load.model,
            "found": last_load.found,
            "components": [
                {"component": row.component, "scheme": row.scheme, "how": row.how, "bytes": row.bytes}
                for row in last_load.parts.values()
            ],
            "error": last_load.error,
        }

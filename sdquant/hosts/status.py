"""What the extension knows of the last load: shown in its tab and by its REST answer."""

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
class Part:
    """What became of one component: its scheme (None: not quantized), how that came, and its bytes."""

    component: str
    scheme: str | None
    how: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One load. `model`: the file's or folder's name. `found`: what it holds. `error`: the sentence, if it failed."""

    model: str | None = None
    found: str | None = None
    parts: Mapping[str, Part] = field(default_factory=dict)
    error: str | None = None


class Status:
    """The last load, of which several threads tell and ask.

    Args:
        clean: takes paths out of a sentence.
    """

    def __init__(self, host: Host, clean: Callable[[str], str]) -> None:
        self.host, self._clean = host, clean
        self._seen = Seen()
        self._lock = threading.Lock()

    @property
    def seen(self) -> Seen:
        """The last load."""
        return self._seen

    def begin(self, model: str | None, found: str | None = None) -> None:
        """A load begins. `found`: what the headers of the file say."""
        with self._lock:
            self._seen = Seen(model=model, found=found)

    def loaded(self, part: Part) -> None:
        """A component is there. After a failure nothing is: the host goes on for a while before the model is gone."""
        with self._lock:
            if self._seen.error is None:
                self._seen = replace(self._seen, parts={**self._seen.parts, part.component: part})

    def failed(self, error: SdquantError) -> None:
        """The load was refused, or went wrong."""
        with self._lock:
            self._seen = replace(self._seen, parts={}, error=self._clean(str(error)))

    def refused(self, error: SdquantError) -> None:
        """A load was refused before it began: what was there is there still."""
        with self._lock:
            self._seen = replace(self._seen, error=self._clean(str(error)))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values. No path is in it: who asks may be anyone who can reach the web UI."""
        seen = self._seen
        return {
            "sdquant": __version__,
            "host": self.host.name,
            "title": self.host.title,
            "can": list(self.host.can),
            "cannot": list(self.host.cannot),
            "decided by the host": dict(self.host.theirs),
            "model": seen.model,
            "found": seen.found,
            "components": [
                {"component": row.component, "scheme": row.scheme, "how": row.how, "bytes": row.bytes}
                for row in seen.parts.values()
            ],
            "error": seen.error,
        }

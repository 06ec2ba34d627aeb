"""Progress of a benchmark, in jobs done."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...utils.progress import OnProgress


class JobProgress:
    """Counts loads (worth two) and turns (worth one)."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress, self._done, self.total = on_progress, 0, 0

    def text(self, text: str) -> None:
        """Report the current step."""
        if self._on_progress is not None:
            self._on_progress(self._done, max(self.total, self._done), text)

    def skip(self, count: int) -> None:
        """Advance the count, also for work that is skipped."""
        self._done += count

    @contextmanager
    def counted(self, text: str, worth: int) -> Iterator[None]:
        """Context of a step that is worth so much, if it does not fail."""
        self.text(text)
        yield
        self.skip(worth)
